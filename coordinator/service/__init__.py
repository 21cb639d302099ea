"""The training service: tenants, durable operations, a driver process per client, artifacts, samples.

Doors: limits, pipe, service, settings, tenants.

May import: `client`, `runs` and the rooms below; `workers`, `attestation`, `metrics`.
"""
