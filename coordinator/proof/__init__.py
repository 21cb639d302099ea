"""The proof of a finished run: from which signed bytes each claim about it follows, and the file an auditor gets.

Doors: bundle, claims, gather, trust, verify.

May import: `planning`, `ledger` and the rooms below, `checkpoints` and `record`; `workers`, `attestation`, `metrics`.
Only `gather`, which works on the site, may import what needs torch or Ray.
"""
