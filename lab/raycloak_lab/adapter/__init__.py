"""Encrypted adapters as a service: a worker process behind gRPC, token budgets, and the client that wraps an encoder.

Experimental; `docs/encrypted-adapters.md` says first what it does not protect.

Doors: encrypted_adapter, places, serve, settings.

May import: `encrypted`; `raycloak`.
"""
