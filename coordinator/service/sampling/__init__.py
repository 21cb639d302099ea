"""Text from released weights: requests and their bounds, a process for each sampled run, and its generation of text.

Doors: requests, sampler.

May import: `client`, `runs` and the rooms below; `workers`, `attestation`, `metrics`. It knows nothing of the service.
"""
