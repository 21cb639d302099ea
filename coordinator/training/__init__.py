"""The step loop: charge, roster, compute, reduce, commit, and the failures of members in between.

Doors: assignment, callback_caller, callbacks, coordinator, hand_loop, public_evaluation, reporting, stop_signals.

May import: `checkpoints`, `membership` and the rooms below; `workers`, `attestation`, `metrics`.
"""
