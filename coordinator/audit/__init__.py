"""The empirical audit: train with canaries through the whole protocol and bound epsilon from below.

Doors: audit.

May import: `runs` and the rooms below; `workers`, `attestation`, `metrics`.
"""
