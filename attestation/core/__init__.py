"""The basics that every other room shares: canonical bytes, signed messages, keys, rosters and the types of evidence.

Doors: byte_reader, canonical, counted_noise, data_marks, evidence, hpke, hybrid_signature, keys, lineage, mask_graph,
messages, private_memory, rate_limit, report_data, roster, secret_urls.

May import: `metrics`.
"""
