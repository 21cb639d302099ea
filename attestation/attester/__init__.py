"""The attesting side of an actor: collect evidence of guest and GPUs, and bind its keys to it.

Doors: attester, guest, tsm.

May import: `gpu`, `snp`, `tdx`, `log` and the rooms below; `metrics`.
"""
