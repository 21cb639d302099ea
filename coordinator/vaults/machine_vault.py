"""A vault of the machine, asked by a process that is no relay: a command that reads, or another vault."""

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.vaults.calls import ActorRefusal, Wire
from raycloak.coordinator.vaults.machine_socket import Seat
from raycloak.coordinator.vaults.vault import Vault, VaultLost
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.metrics.file_errors import file_error

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_S: Final = 120.0
"""For a vault to start, import and answer on a busy machine."""


class MachineVault:
    """A connection to a vault of the machine, by method. A context manager.

    Args:
        socket: where it listens.
        opening: of its role.

    Raises:
        ConfigError: ``vault_unreachable`` if nobody listens there.
    """

    def __init__(self, socket: str, opening: Message) -> None:
        try:
            self._vault = Vault(partial(Seat, socket), opening, None, lambda _: None)
        except OSError as error:
            raise file_error("vault_unreachable", "connect to", socket, error, ConfigError) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> T:
        """Return a method's answer, of one value.

        Raises:
            RaycloakError: what it raises, or why it is refused.
            RunFailedError: ``vault_lost`` if the vault ended.
        """
        wire = Wire.of(method)
        frames = wire.write_call(wire.positional(args, keywords))
        try:
            (frame,) = self._vault.call(method.__name__, 1, frames, timeout_s=ANSWER_S)
        except ActorRefusal as refusal:
            raise parse(Failed, refusal.args[0]).raised() from None
        except (VaultLost, TimeoutError):
            raise RunFailedError(
                "vault_lost", "a vault of the machine has ended, or does not answer.", "See the log of its unit."
            ) from None
        return wire.read_answer(0, frame)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the connection, which ends the vault."""
        self._vault.end()
