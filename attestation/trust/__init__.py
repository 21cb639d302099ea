"""The roots of trust: pinned vendor certificates, chains, numbers that may only rise, and TLS on attested keys.

Doors: certificates, channel, floors, guest, roots.

May import: `files` and the rooms below; `metrics`.
"""
