"""Benchmarks of one machine: masking, noise, the phases of a step, and attestations per second.

Doors: attest, mask, noise, step.

May import: `runs` and the rooms below; `workers`, `attestation`, `metrics`.
"""
