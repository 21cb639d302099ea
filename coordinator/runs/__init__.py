"""Whole executions: train, resume, replay or discard a run, on Ray or in this process, and give its verdict.

Doors: demo, discard, evidence_address, local_session, replay, rollback, trainer, verdict.

May import: `training` and the rooms below; `workers`, `attestation`, `metrics`.
"""
