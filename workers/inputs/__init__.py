"""The inputs of a worker: datasets, sealed slices, sent examples, user code and the marks of data.

Doors: augmentation, built_rows, code_bundle, datasets, descriptor, file_sets, fingerprint, hub_files, images,
in_memory, inspection, named_inputs, rows, sealed, sent_rows, text_data, units, user_code, void.

May import: `terms` and the rooms below; `attestation`, `metrics`.
"""
