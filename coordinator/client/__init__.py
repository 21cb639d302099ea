"""The client of a training service: configuration, futures, connection. It needs neither Ray nor torch.

Doors: connection, futures, local_service, results, sent_batches, service_client, service_pb2,
training_client, training_config.

May import: `config` and the rooms below; the terms of `workers`, `attestation`, `metrics`.
"""
