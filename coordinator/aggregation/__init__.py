"""The aggregator: sum masked vectors of one parameter range, decode only the whole sum, apply the update rule.

Doors: aggregator, ranges.
May import: accounting, config, console, quick_imports; workers, attestation, metrics.
"""
