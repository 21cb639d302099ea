"""Vaults: the plain classes of the four roles in processes of their own, where their secrets are.

Hides how a vault is started or reached, called, cancelled, asked to leave and lost. An actor system relays calls to
vaults, and holds nothing of theirs. The calls are canonical messages, whoever carries them.

Doors: aggregator_vault, calls, hosted, listener, machine_ledger, machine_name, machine_socket, openings, platforms,
run_orchestrator, settings, vault, worker_vault.

May import: `ledger`, `aggregation` and the rooms below; `workers`, `attestation`, `metrics`.
"""
