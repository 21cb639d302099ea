"""The inputs of a worker: datasets, sealed slices, user code, models and the marks of data.

Doors: built_rows, canaries, compute_mode, datasets, descriptor, file_sets, fingerprint, held_values,
hub_files, hub_model, images, in_memory, inspection, losses, model_fixes, models, named_inputs, rows, sealed, sent_rows,
sent_slots, text_data, text_model, user_code, void.

May import: `terms` and the rooms below; `attestation`, `metrics`.
"""
