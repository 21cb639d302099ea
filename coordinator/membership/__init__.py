"""The members of a run: start, attest, admit and replace them, and decide who hosts which virtual worker.

Doors: departures, hosting, membership, newcomers.
May import: cluster, evidence, record, planning, ledger, aggregation, accounting, config, console, quick_imports;
workers, attestation, metrics.
"""
