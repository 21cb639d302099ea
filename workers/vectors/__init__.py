"""The way from a clipped sum to a masked vector: sampling, ring, noise, masks, tags and their keystreams.

Doors: masks, noise, payload, ring, sampling, streams, threads, vector_tag.

May import: `attestation`, `metrics`.
"""
