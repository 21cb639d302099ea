"""The basics that every other room shares: canonical bytes, signed messages, keys, rosters and the types of evidence.

Doors: byte_reader, canonical, counted_noise, evidence, hpke, hybrid_signature, keys, mask_graph, messages, rate_limit,
report_data, roster.

May import: `metrics`.
"""
