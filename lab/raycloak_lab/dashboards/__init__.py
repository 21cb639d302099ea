"""The Grafana dashboards, and the program that writes their JSON and the rules for the Prometheus operator.

raycloak's wheel carries the JSON that it writes, and no run needs the program.

Doors: none.

May import: no other room.
"""
