"""Handout: which keys each worker was given in the current epoch, and how far it has seen the evidence log."""

from dataclasses import dataclass, field

from attestation.key_release import KeyRelease
from attestation.messages import Envelope
from coordinator.control import Control
from coordinator.hosting import Hosting, moved


@dataclass(slots=True)
class Handout:
    """Asks the orchestrator for keys, and remembers who has which.

    Attributes:
        most: virtual workers whose keys of one epoch a worker may ever hold; None for any number.
    """

    control: Control
    most: int | None
    _epoch: int = -1
    _keyed: Hosting = field(default_factory=dict)
    _held: dict[str, set[int]] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    def begin(self, epoch: int) -> None:
        """What is given from now on is of ``epoch``; in another one than before, nobody has anything yet."""
        if epoch != self._epoch:
            self._epoch, self._keyed, self._held = epoch, {}, {}

    def exposed(self, hosting: Hosting) -> str | None:
        """A worker that would have held more keys of this epoch than it may."""
        if self.most is None:
            return None
        held = {i: self._held.get(i, set()) | set(hosted) for i, hosted in hosting.items()}
        return next((member_id for member_id, each in held.items() if len(each) > self.most), None)

    def missing(self, hosting: Hosting) -> Hosting:
        """The keys that workers lack for ``hosting``, which is what they are given next."""
        needs = moved(self._keyed, hosting)
        # A worker drops the keys that a roster does not give it: if it is to host again, they are sent again.
        self._keyed = hosting
        return needs

    def release(self, member_id: str, virtual_workers: tuple[int, ...]) -> KeyRelease:
        """Keys for a worker, with the proof that the log goes on from what it has seen of it."""
        seen = self._seen.get(member_id, 0)
        self._held.setdefault(member_id, set()).update(virtual_workers)
        return self.control.orchestrator.release(member_id, self._epoch, virtual_workers, seen)

    def accepted(self, member_id: str, release: KeyRelease, commitments: Envelope) -> None:
        """A worker took its keys, and committed to the slices they belong to."""
        self._seen[member_id] = release.log_length
        self.control.orchestrator.record_data(commitments)
