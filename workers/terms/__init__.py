"""The terms of a run that a worker checks: manifest, mechanism, measurements, receipt and parameter digest.

Doors: binding, loss, manifest, measurement, mechanism, parameter_digest, public_sums, receipt, step_input.

May import: `vectors`; `attestation`, `metrics`.
"""
