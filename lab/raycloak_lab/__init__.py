"""What stands beside raycloak: benches for its developers, predictions of scale, adapters over encrypted activations.

A distribution of its own, ``raycloak-lab``, with the command ``raycloak-lab``. It imports raycloak, which never imports
it.

Doors: its rooms, each with a docstring of its own; ``docs/architecture.md`` draws their order.

May import: `raycloak`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter

__all__ = ["EncryptedAdapter"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that a server and the benches do not load torch."""
    if name not in __all__:
        raise AttributeError(f"module 'raycloak_lab' has no attribute '{name}'")
    from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter

    return EncryptedAdapter
