"""The step loop: charge, roster, compute, reduce, commit, and the failures of members in between.

Doors: coordinator, public_evaluation, reporting, stop_signals.
May import: checkpoints, membership, cluster, evidence, record, planning, ledger, aggregation, accounting, config,
console, quick_imports; workers, attestation, metrics.
"""
