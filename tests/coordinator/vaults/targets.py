"""Classes that vaults of the tests host."""

import os
import signal
import threading
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.messages import Message
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.platforms import platform_under
from raycloak.metrics.errors import BudgetError, ConfigError
from tests.private_memory import memory_is_private


class ExampleOpening(Message):
    DOMAIN: ClassVar[str] = "test/vault/opening/v1"
    text: str


class Example(Hosted):
    """A class whose methods show what a vault passes on."""

    OPENING = ExampleOpening
    BESIDE = True

    def __init__(self, opening: ExampleOpening, inside: Inside) -> None:
        if opening.text == "refused":
            raise ConfigError("no_place", "there is no place for it", "Make room.")
        if opening.text == "defect":
            raise ValueError("planted-text")
        self._text, self._inside, self._over = opening.text, inside, False
        self._released = threading.Event()

    def text(self) -> str:
        return self._text

    def twice(self, array: NDArray[np.float64], state: Mapping[str, np.ndarray]) -> tuple[NDArray[np.float64], int]:
        return 2 * array, len(state)

    def many(self, *arrays: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return np.concatenate(arrays)

    def wait(self) -> str:
        """Wait until the call is cancelled or `release` was called beside it."""
        while not self._inside.is_cancelled():
            if self._released.wait(0.01):
                return "released"
        return "cancelled"

    def view(self) -> int:
        self._released.set()
        return threading.get_ident()

    def leaving(self) -> bool:
        return self._inside.is_leaving()

    def spoil(self) -> str:
        self._over = True
        return "spoiled"

    def is_over(self) -> bool:
        return self._over

    def refuse(self) -> None:
        raise BudgetError("exhausted", "nothing is left", "Ask for more.")

    def fail(self) -> None:
        raise ValueError("planted-text")

    def out_of_memory(self) -> None:
        raise MemoryError

    def quote(self, simulated: bool) -> bytes:
        return platform_under(self._inside, simulated).collect(b"r" * 64).quote

    def is_private(self) -> bool:
        return memory_is_private()

    def found(self, name: str) -> str:
        return os.environ.get(name, "")

    def end(self, number: int) -> None:
        os.kill(os.getpid(), number)
        signal.pause()
