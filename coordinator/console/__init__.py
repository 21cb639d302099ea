"""The output of a command: one JSON object or tables for a person, on streams that may be closed or lost.

Doors: figures, output, streams, tables.

May import: `workers`, `attestation`, `metrics`.
"""
