"""The Grafana dashboard: its panels, and the program that writes its JSON.

Doors: none.

May import: no other room.
"""
