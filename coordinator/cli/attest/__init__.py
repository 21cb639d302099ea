"""The commands ``raycloak attest``: recorded cases, a run's log, policies in words, revocations, the evidence service.

Doors: attest.

May import: `cli.options` and the rooms below `cli`; `workers`, `attestation`, `metrics`.
"""
