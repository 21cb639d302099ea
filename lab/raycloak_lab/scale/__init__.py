"""The prediction of a step at sizes that nobody can try, from rates of this machine.

Doors: calibration, simulation, tables.

May import: `raycloak`.
"""
