"""The documents that a run's record becomes: a page, its figures, technical documentation, a model card, and the words.

Doors: document, model_card, pdf, words.

May import: `evidence`, `record` and the rooms below; `workers`, `attestation`, `metrics`.
"""
