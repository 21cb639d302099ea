"""Results for a person on a terminal: plans, verdicts and runs, and a run's live picture.

Doors: plan, runs, top, verdict.

May import: the rooms below `cli`; `attestation`, `metrics`. It knows no command.
"""
