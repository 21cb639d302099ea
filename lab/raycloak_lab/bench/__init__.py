"""Measurements that only raycloak's developers need: attestations and operations per second, a block of an adapter.

Doors: adapter, attest, service.

May import: `encrypted`; `raycloak`.
"""
