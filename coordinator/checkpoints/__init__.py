"""Checkpoints as sealed packages (TSSP): write, publish, retain, verify and read them.

Doors: archive, package_file, reader, saver, storage, writer.

May import: `cluster` and the rooms below; `workers`, `attestation`, `metrics`.
"""
