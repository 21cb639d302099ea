"""The verifier of NVIDIA GPU evidence: report, reference values, OCSP, state, and the GPUs of one worker as a set.

Doors: gpu_set, report, rules, verify.

May import: `trust` and the rooms below; `metrics`.
"""
