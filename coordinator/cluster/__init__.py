"""The wiring on Ray: actors, placement, and how a call to an actor waits, fails and is repeated.

Doors: actors, backend, calls, control, local_ray, machine_names, node_evidence, pipelines, placement, process_table,
ray_address, ray_backend, ray_calls, ray_control, remote, tuning.

May import: `evidence`, `record` and the rooms below; `workers`, `attestation`, `metrics`.
"""
