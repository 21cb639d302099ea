"""The inputs of a worker: datasets, sealed slices, user code, models and the fingerprint of data.

Doors: canaries, compute_mode, datasets, descriptor, fingerprint, held_values, hub_model, models, sealed, text_model,
user_code.

May import: `terms` and the rooms below; `attestation`, `metrics`.
"""
