"""The evidence service over gRPC: server, client, limits, and the data owner's key service.

Doors: calls, client, connections, fair_lock, grpc_status, key_service, limits, memory, server, serving_orchestrator.

May import: `orchestrator` and the rooms below; `metrics`.
"""
