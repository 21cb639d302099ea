"""Child processes: how one is started, spoken to and ended, and what it left of its log.

Hides pipes, signals, descriptors and shared memory. It knows nothing of what a child does.

Doors: channel, child, deadline, failure, program.

May import: `core`; `metrics`.
"""
