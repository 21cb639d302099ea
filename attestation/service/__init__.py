"""The evidence service over gRPC: server, client, limits, and the data owner's key service.

Doors: client, fair_lock, key_service, limits, server, serving_orchestrator.
May import: orchestrator, sealed, vectors, appraisal, collateral, keys, attester, policy, simulators, gpu, snp, tdx,
log, trust, files, core; metrics.
"""
