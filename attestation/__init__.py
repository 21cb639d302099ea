"""Evidence and keys: verify hardware evidence, admit members, release keys, keep the log, and start processes.

It imports neither torch nor Ray.

Doors: its rooms, each with its own docstring; ``docs/architecture.md`` draws their order.

May import: `raycloak.metrics`.
"""
