"""Errors, Prometheus metrics, events and alerts. The lowest package: it imports neither torch nor Ray.

Doors: its modules.

May import: none of the other packages.
"""
