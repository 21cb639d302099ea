"""The orchestrator of one run: its admissions, rosters, key releases and commits, each logged before it takes effect.

Doors: admissions, commits, data_commitments, documents, evaluation_order, hosting, key_desk, loads,
machine_book, orchestrator, package_desk, peer_desk, revocations, run_terms, state.

May import: `sealed`, `vectors` and the rooms below; `metrics`.
"""
