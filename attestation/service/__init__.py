"""The evidence service over gRPC: server, client, limits, and the data owner's key service.

Doors: client, fair_lock, grpc_status, key_service, limits, server, serving_orchestrator.

May import: `orchestrator` and the rooms below; `metrics`.
"""
