"""The simulated TDX vendor and platforms, for machines without a TEE: evidence of genuine format, its own root.

Doors: tdx_pki, tdx_platform, tdx_vendor.

May import: `gpu`, `snp`, `tdx`, `log` and the rooms below; `metrics`.
"""
