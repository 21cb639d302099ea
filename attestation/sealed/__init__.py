"""Sealed packages and sealed data: their manifests, keys, recipients and chunked encryption.

Doors: chunk_stream, demand, package_keys, package_manifest, sealed_data.

May import: `appraisal`, `collateral`, `keys` and the rooms below; `metrics`.
"""
