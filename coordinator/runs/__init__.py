"""Whole executions: train, resume, replay or discard a run, show its progress, give its verdict, load and export its
model.

Doors: by_hand, demo, discard, evidence_address, execution, export, local_session, progress, ray_start, released_model,
replay, rollback, search, trainer, verdict.

May import: `training` and the rooms below; `workers`, `attestation`, `metrics`.
"""
