"""Benchmarks of one machine: masking, gradients, a start, a step.

Doors: bare_ray, gradient, gradient_cases, mask, resident_memory, start, step.

May import: `runs` and the rooms below; `workers`, `attestation`, `metrics`.
"""
