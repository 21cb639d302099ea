"""The Grafana dashboards, and the program that writes their JSON and the rules for the Prometheus operator.

Doors: panels, render.

May import: no other room.
"""
