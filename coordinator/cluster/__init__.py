"""The wiring on Ray: actors, placement, and how a call to an actor waits, fails and is repeated.

Doors: actors, backend, control, node_evidence, placement, processes, ray_backend, ray_control.
May import: evidence, record, planning, ledger, aggregation, accounting, config, console, quick_imports; workers,
attestation, metrics.
Ray: here, in `bench/chaos` and in `cli/doctor`; nowhere else.
"""
