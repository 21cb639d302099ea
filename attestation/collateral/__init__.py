"""The vendors' collateral: read it from files, or fetch it from the services of a policy and keep it current.

Doors: encoding, files, keeper.

May import: `attester`, `policy`, `simulators` and the rooms below; `metrics`.
"""
