"""The evidence log: an append-only Merkle log with signed heads, its proofs, and the newest head that a reader saw.

Doors: entries, evidence_log, watch.

May import: `trust` and the rooms below; `metrics`.
"""
