"""Checkpoints as sealed packages (TSSP): write, publish, retain, verify and read them.

Doors: archive, reader, saver, storage, writer.
May import: cluster, evidence, record, planning, ledger, aggregation, accounting, config, console, quick_imports;
workers, attestation, metrics.
"""
