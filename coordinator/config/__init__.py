"""The typed configuration of a run and its sections, and the paths below RAYCLOAK_HOME.

Doors: home, run, section, sections.

May import: `console`; `workers`, `attestation`, `metrics`.
"""
