"""The verifier of Intel TDX quotes against collateral, with a second opinion by dcap-qvl.

Doors: quote, rules, verify.

May import: `trust` and the rooms below; `metrics`.
"""
