"""The verifier of NVIDIA GPU evidence: report, reference values, OCSP, state, the GPUs of one worker as a set, and
the switches between them.

Doors: device, report, rules, switches, verify.

May import: `trust` and the rooms below; `metrics`.
"""
