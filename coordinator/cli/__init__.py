"""The command `raycloak`: its options, its tables and its exit codes; no module below it knows a command.

Doors: app.
May import: audit, bench, runs, training, checkpoints, membership, cluster, evidence, record, planning, ledger,
aggregation, accounting, config, console, quick_imports; workers, attestation, metrics.
"""
