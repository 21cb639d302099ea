"""The chaos bench: train under random SIGKILL and SIGSTOP and compare with the undisturbed run.

Doors: chaos, report.
May import: runs, training, checkpoints, membership, cluster, evidence, record, planning, ledger, aggregation,
accounting, config, console, quick_imports; workers, attestation, metrics.
Ray: yes, to start and watch a cluster of its own.
"""
