"""Benchmarks of one machine: masking, noise, gradients, a start, the phases of a step, and attestations per second.

Doors: attest, calibration, gradient, gradient_cases, mask, noise, start, step.

May import: `runs` and the rooms below; `workers`, `attestation`, `metrics`.
"""
