"""The chaos bench: train under random SIGKILL and SIGSTOP and compare with the undisturbed run.

Doors: chaos, report.

May import: `raycloak`.
"""
