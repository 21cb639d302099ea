"""The members of a run: start, attest, admit and replace them, and decide who hosts which virtual worker.

Doors: crew, founders, hosting, members, membership.

May import: `cluster` and the rooms below; `workers`, `attestation`, `metrics`.
"""
