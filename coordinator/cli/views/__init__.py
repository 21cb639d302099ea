"""Results for a person on a terminal: tables of plans, accounts and runs, and a run's live picture.

Doors: budget, plan, runs, top, verdict.

May import: the rooms below `cli`; `attestation`, `metrics`. It knows no command.
"""
