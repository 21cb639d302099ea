"""The keys of virtual workers: the run secret at rest, key release to an attested member, and keys in two halves.

Doors: halves, release, run_secret.

May import: `attester`, `policy`, `simulators` and the rooms below; `metrics`.
"""
