"""The empirical audit: train with canaries through the whole protocol and bound epsilon from below.

Doors: audit.
May import: runs, training, checkpoints, membership, cluster, evidence, record, planning, ledger, aggregation,
accounting, config, console, quick_imports; workers, attestation, metrics.
"""
