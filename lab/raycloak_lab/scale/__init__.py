"""The prediction of a step at sizes that nobody can try, from rates of this machine, and of a model too large for it.

Doors: calibration, large_models, simulation, tables.

May import: `raycloak`.
"""
