"""Whole executions: train, resume, replay or discard a run, on Ray or in this process, and give its verdict.

Doors: demo, discard, evidence_address, local_session, replay, rollback, trainer, verdict.
May import: training, checkpoints, membership, cluster, evidence, record, planning, ledger, aggregation, accounting,
config, console, quick_imports; workers, attestation, metrics.
"""
