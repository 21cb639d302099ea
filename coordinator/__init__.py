"""The driver's side of a run: planning, ledger, cluster, training, command line. The only package that imports Ray.

Doors: its rooms, each with a docstring of its own; ``docs/architecture.md`` draws their order.

May import: `raycloak.workers`, `raycloak.attestation`, `raycloak.metrics`.
"""
