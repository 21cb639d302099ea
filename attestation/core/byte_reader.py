"""Takes fields off the front of evidence that is not trusted yet."""

from raycloak.attestation.core.evidence import Refusal, refuse


class ByteReader:
    """A position in a byte string. Raises ``evidence_malformed`` where the string is too short.

    Args:
        what: names the bytes in error messages.

    Attributes:
        position: of the next byte.
    """

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._what = what
        self.position = 0

    @property
    def at_end(self) -> bool:
        """Return whether every byte has been taken."""
        return self.position == len(self._data)

    def take(self, size: int) -> bytes:
        """Take the next ``size`` bytes."""
        end = self.position + size
        if end > len(self._data):
            refuse(Refusal.EVIDENCE_MALFORMED, f"the {self._what} ends before byte {end}")
        part = self._data[self.position : end]
        self.position = end
        return part

    def integer(self, size: int) -> int:
        """Take the next ``size`` bytes as a little-endian number."""
        return int.from_bytes(self.take(size), "little")

    def expect(self, size: int, value: int, name: str) -> None:
        """Take a number that must be ``value``."""
        found = self.integer(size)
        if found != value:
            refuse(Refusal.EVIDENCE_MALFORMED, f"the {self._what}'s {name} is {found} instead of {value}")

    def expect_rest(self, name: str) -> None:
        """Take a 4-byte number that must be the number of bytes behind it."""
        self.expect(4, len(self._data) - self.position - 4, name)

    def rest(self) -> bytes:
        """Return the bytes that are not taken yet, without taking them."""
        return self._data[self.position :]
