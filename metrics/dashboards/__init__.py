"""The Grafana dashboards, and the program that writes their JSON and the rules for the Prometheus operator.

Doors: none.

May import: no other room.
"""
