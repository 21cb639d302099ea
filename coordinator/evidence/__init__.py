"""The sources of evidence on real machines, the standalone evidence service, and the outside observer.

Doors: observer, sources, standalone_service.

May import: `planning` and the rooms below; `workers`, `attestation`, `metrics`.
"""
