"""The wiring on Ray: actors, placement, and how a call to an actor waits, fails and is repeated.

Doors: actors, backend, control, node_evidence, pipelines, placement, processes, ray_backend, ray_calls, ray_checks,
ray_control, remote, tuning.

May import: `report`, `vaults` and the rooms below; `workers`, `attestation`, `metrics`.
"""
