"""Benchmarks of one machine: masking, noise, the phases of a step, and attestations per second.

Doors: attest, mask, noise, step.
May import: runs, training, checkpoints, membership, cluster, evidence, record, planning, ledger, aggregation,
accounting, config, console, quick_imports; workers, attestation, metrics.
"""
