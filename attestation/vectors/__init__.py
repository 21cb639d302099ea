"""The index of evidence cases: read it, and judge each case by the verifier of its family.

Doors: check, index.

May import: `appraisal`, `collateral`, `keys` and the rooms below; `metrics`.
"""
