"""The verifier of NVIDIA GPU evidence: report, reference values, OCSP, state, and the GPUs of one worker as a set.

Doors: report, rules, verify.

May import: `trust` and the rooms below; `metrics`.
"""
