"""The computation on private data: examples, clipped gradients, ring vectors, noise and masks. It never imports Ray.

Doors: its modules, and the rooms `terms`, `vectors`, `inputs`, `models` and `gradients`.

May import: `raycloak.attestation`, `raycloak.metrics`.
"""
