"""Where encrypted adapters keep their state: ``adapters/`` below ``RAYCLOAK_HOME``."""

from pathlib import Path

from raycloak.coordinator.config.home import home, private_folder, random_key


def adapters_folder() -> Path:
    """Return the folder of encrypted adapters, mode 0700: token budgets of a server, sessions' logs of a client."""
    return private_folder(home() / "adapters")


def identity_file() -> Path:
    """Return the file of the key that a client of encrypted adapters is known by; made, mode 0600, if missing."""
    return random_key(adapters_folder() / "client.key")
