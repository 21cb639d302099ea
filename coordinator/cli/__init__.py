"""The command `raycloak`: its options, its tables and its exit codes; no module below it knows a command.

Doors: app, options.

May import: `audit`, `proof` and the rooms below; `workers`, `attestation`, `metrics`.
"""
