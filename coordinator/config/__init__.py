"""The typed configuration of a run and its sections, and the paths below RAYCLOAK_HOME.

Doors: home, losses, run, secret_variables, section, sections.

May import: `console`; `workers`, `attestation`, `metrics`.
"""
