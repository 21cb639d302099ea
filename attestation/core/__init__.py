"""The basics that every other room shares: canonical bytes, signed messages, keys, rosters and the types of evidence.

Doors: byte_reader, canonical, data_marks, evidence, hpke, hybrid_signature, keys, mask_graph, messages, rate_limit,
report_data, roster.

May import: `metrics`.
"""
