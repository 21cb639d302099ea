"""Encrypted adapters as a service: a worker process behind gRPC, token budgets, and the client that wraps an encoder.

Experimental, and the extra `he`; `docs/encrypted-adapters.md` says first what it does not protect.

Doors: encrypted_adapter, serve, settings.

May import: `runs` and the rooms below; `workers`, `attestation`, `metrics`.
"""
