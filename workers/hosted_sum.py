"""The sum of the vectors that a worker hosts in one step: all that it keeps of them until the next request for a step.

Hides how many virtual workers it hosts: memory holds one vector's words for each parameter, and those of another vector
while it is added. A sum is enough, since only the sum ever leaves, under masks.
"""

import numpy as np

from raycloak.attestation.core.roster import Query
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.terms.public_sums import PublicSums
from raycloak.workers.vectors.ring import RingVector
from raycloak.workers.virtual_worker import EncodedVector

Place = tuple[Query, int, bytes, bytes]
"""Query, step, input digest and data root: a vector is a function of these and of its virtual worker."""


class HostedSum:
    """The ring sum of kept vectors, and the tag of each.

    Attributes:
        tags: by virtual worker, of the vectors in the sum.
        counted: by virtual worker, the exact sums that came with its vector; of public data alone.
    """

    def __init__(self) -> None:
        self.tags: dict[int, bytes] = {}
        self.counted: dict[int, PublicSums] = {}
        self._place: Place | None = None
        self._words: RingVector | None = None

    @property
    def words(self) -> RingVector:
        """The sum, uint32 or uint64 [d], in clear; the caller only reads it."""
        assert self._words is not None, "a vector was added"
        return self._words

    def drop_all_but(self, hosted: tuple[int, ...]) -> None:
        """Drop everything if a vector of another virtual worker than these is in it: a sum cannot lose one."""
        if not self.tags.keys() <= set(hosted):
            self._begin(None)

    def missing(self, hosted: tuple[int, ...], place: Place) -> tuple[int, ...]:
        """Return the virtual workers whose vectors at ``place`` are not in it; vectors of another place are dropped."""
        if place != self._place:
            self._begin(place)
        return tuple(v for v in hosted if v not in self.tags)

    def add(self, v: int, vector: EncodedVector) -> None:
        """Add a vector of the present place. Its memory may become the sum's own."""
        require_bound(v not in self.tags, "a virtual worker is in a sum once")
        if self._words is None:
            self._words = vector.values
        else:
            np.add(self._words, vector.values, out=self._words)
        self.tags[v] = vector.tag
        if vector.counted is not None:
            self.counted[v] = vector.counted

    def _begin(self, place: Place | None) -> None:
        self._place, self._words, self.tags, self.counted = place, None, {}, {}
