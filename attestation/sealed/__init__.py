"""Sealed packages, sealed data and sent batches: their manifests, keys, recipients and chunked encryption.

Doors: chunk_stream, demand, package_keys, package_manifest, sealed_data, sent_batch.

May import: `appraisal`, `collateral`, `keys` and the rooms below; `metrics`.
"""
