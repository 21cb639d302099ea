"""The appraisal of a presentation: pure functions from evidence, collateral, policy and time to a result or a refusal.

Doors: appraisal, eat, enrolment, mutual.

May import: `attester`, `policy`, `simulators` and the rooms below; `metrics`.
"""
