"""The record that a run leaves: its directory and readers, its outcome, and the check that executions are one run.

Doors: batch_files, folder, outcome, run_comparison, run_course, run_list, run_reader, same_run, verdict.

May import: `planning` and the rooms below; `workers`, `attestation`, `metrics`.
"""
