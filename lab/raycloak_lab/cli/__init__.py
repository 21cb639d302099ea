"""The command ``raycloak-lab``: its options, its tables and its exit codes; no module below it knows a command.

Doors: app.

May import: the rooms beside it; `raycloak`.
"""
