"""The step loop: charge, roster, compute, reduce, commit, and the failures of members in between.

Doors: assignment, callback_caller, callbacks, evaluation, hand_loop, pace, phases, reporting, state_requests, steps.

May import: `checkpoints`, `membership` and the rooms below; `workers`, `attestation`, `metrics`.
"""
