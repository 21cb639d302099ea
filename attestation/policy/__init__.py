"""The policy: which evidence a run accepts, its explanation in words, and the key policies that follow from it.

Doors: collateral_service, explain, key_policy, policy.

May import: `gpu`, `snp`, `tdx`, `log` and the rooms below; `metrics`.
"""
