"""The command `raycloak`: its options, its tables and its exit codes; no module below it knows a command.

Doors: app, bench, options, program.

May import: `audit`, `bench` and the rooms below; `workers`, `attestation`, `metrics`.
"""
