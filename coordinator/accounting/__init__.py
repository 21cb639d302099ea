"""Privacy accounting as pure functions: epsilon of composed releases under RDP and PLD, and the noise for a target.

Doors: accountants, calibration, opacus_modules, outward, pld, releases, renyi.

May import: `config` and the rooms below; `workers`, `attestation`, `metrics`.
"""
