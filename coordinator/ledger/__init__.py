"""The privacy ledger: a durable, signed record that charges each step before it is computed, once, below the cap.

Doors: accounts, audit, cap_authority, entries, export, known_data, ledger, location, rules, store, view, witness.

May import: `accounting` and the rooms below; `workers`, `attestation`, `metrics`.
"""
