"""The members of a run: start, attest, admit and replace them, and decide who hosts which virtual worker.

Doors: crew, departures, founders, hosting, members, membership, timing.

May import: `cluster` and the rooms below; `workers`, `attestation`, `metrics`.
"""
