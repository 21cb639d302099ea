"""The record that a run leaves: its directory, its outcome, and the check that a later execution is the same run.

Doors: folder, outcome, run_comparison, run_course, run_list, run_reader, same_run.

May import: `planning` and the rooms below; `workers`, `attestation`, `metrics`.
"""
