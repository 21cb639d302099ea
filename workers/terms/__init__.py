"""The terms of a run that a worker checks: manifest, mechanism, measurements, receipt and model digest.

Doors: binding, built_in_rules, loss, manifest, measurement, mechanism, model_digest, public_sums, receipt, step_input.

May import: `vectors`; `attestation`, `metrics`.
"""
