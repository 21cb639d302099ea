"""Vaults: the plain classes of the four roles in processes of their own, where their secrets are.

Hides how a vault is started, called, cancelled, asked to leave and lost. An actor system relays calls to vaults, and
holds nothing of theirs. The calls are canonical messages, whoever carries them.

Doors: aggregator_vault, calls, hosted, openings, run_orchestrator, vault, worker_vault.

May import: `evidence` and the rooms below; `workers`, `attestation`, `metrics`.
"""
