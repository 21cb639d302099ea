"""The aggregator: sum masked vectors of one parameter range, decode only the whole sum, apply the update rule.

Doors: aggregator, ranges, rule_trial, update_rules.

May import: `accounting` and the rooms below; `workers`, `attestation`, `metrics`.
"""
