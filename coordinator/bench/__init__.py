"""Benchmarks of one machine: masking, noise, gradients, a start, a step, attestations and operations per second.

Doors: adapter, attest, calibration, gradient, gradient_cases, mask, noise, service, start, step.

May import: `service` and the rooms below; `workers`, `attestation`, `metrics`.
"""
