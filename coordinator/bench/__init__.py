"""Benchmarks of one machine: masking, noise, gradients, the phases of a step, and attestations per second.

Doors: attest, calibration, gradient, gradient_cases, mask, noise, step.

May import: `runs` and the rooms below; `workers`, `attestation`, `metrics`.
"""
