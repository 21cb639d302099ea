"""The distribution's version, in a module of its own: reading it imports nothing else."""

VERSION = "0.1.0"
