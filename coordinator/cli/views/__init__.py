"""Results for a person on a terminal: tables of plans, accounts and runs, a run's progress and its live picture.

Doors: budget, plan, progress, runs, scale, top, verdict.

May import: the rooms below `cli`; `attestation`, `metrics`. It knows no command.
"""
