"""The frozen privacy mechanism: sampling or sending, clipping, encoding, noise and accounting in one object.

Sampler, clipper, encoder, noise and ledger event are all built from a :class:`Mechanism`; none takes a loose q, z
or C. Hosting and speed settings are not fields, so they cannot change its digest.
"""

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from raycloak.attestation.core.messages import Message
from raycloak.attestation.core.roster import Query

AccountantName = Literal["rdp", "pld"]
"""Accountants that can hold a cap: Renyi differential privacy, or privacy loss distributions."""


class Mechanism(Message):
    """A Gaussian sum query over sampled or sent examples, repeated ``steps`` times, in an integer ring.

    Attributes:
        query: the quantity of an example that is summed.
        private: False only for data declared public; then nothing is clipped or noised.
        unit, adjacency: one example; neighbours differ by one example contributing zero, ids and keys stay.
        num_examples: N, public: of the dataset, or of data that a client sends, the most examples of one step.
        virtual_workers: V; example i belongs to virtual worker i mod V.
        sample_rate: q; example i is drawn iff its 64-bit draw is below q * 2^64. 1 of sent data: all of it is used.
        steps: number of releases the noise was planned for.
        max_grad_norm: C, the l2 bound of one example's contribution before encoding.
        noise_multiplier: z, standard deviation of the counted noise in units of ``sensitivity``.
        honest_share: h, the share of virtual workers whose noise is counted on, in (0, 1].
        expected_batch_size: the public divisor of the released sum.
        dimension: d, number of coordinates.
        ring_bits, gamma_log2: the ring Z_{2^ring_bits} with grid step gamma = 2^gamma_log2.
        clamp: K, bound of each coordinate of one virtual worker's sum.
        sigma: standard deviation of one virtual worker's noise, in ring units.
        micro_batch_size, micro_batches: fixed physical shape m and count M; at most m*M examples are used.
        overflow_probability: eta, bound on the chance that any draw of the run exceeds m*M and is cut, for which delta
            pays. 0 if epsilon pays: the accountant then composes the cut mechanism itself.
        accountant: which accountant holds the cap.
        max_participations: k of sent data: most releases that one example takes part in, whoever chooses them. None for
            a dataset, every example of which may take part in every release. Left out of the bytes then: ledgers of
            earlier versions hold mechanisms without it, whose digests must stay.
    """

    DOMAIN: ClassVar[str] = "raycloak/mechanism/v1"

    query: Query = "gradient"
    private: bool
    unit: Literal["example"] = "example"
    adjacency: Literal["zero_out"] = "zero_out"
    num_examples: int
    virtual_workers: int
    sample_rate: float
    steps: int
    max_grad_norm: float
    noise_multiplier: float
    honest_share: float
    expected_batch_size: float
    dimension: int
    ring_bits: Literal[32, 64]
    gamma_log2: int
    clamp: float
    sigma: float
    micro_batch_size: int
    micro_batches: int
    overflow_probability: float
    accountant: AccountantName = "rdp"
    max_participations: int | None = Field(default=None, gt=0, exclude_if=lambda bound: bound is None)

    @model_validator(mode="after")
    def _sent_examples_are_all_used(self) -> Self:
        if self.max_participations is not None and (self.sample_rate != 1 or not self.private):
            raise ValueError("examples that a client sends are private, and none is left to chance")
        return self

    def participations(self, releases: int) -> int:
        """Return how many of so many releases one example can take part in, and so how many it is charged for.

        Guarantee: the charge of each release beyond the bound is zero, whichever releases an example took part in
        (docs/proofs/009).
        """
        return releases if self.max_participations is None else min(releases, self.max_participations)

    @property
    def gamma(self) -> float:
        """The grid step: the real value of one ring unit."""
        return math.ldexp(1.0, self.gamma_log2)

    @property
    def sensitivity(self) -> float:
        """C' = C + gamma * sqrt(d), the l2 bound of one example's effect on the encoded sum.

        Nearest rounding moves each coordinate by at most half a unit for either neighbour. Float slack is not
        added here: clipping aims below C by more than every rounding error (see `workers/gradients/clipping.py`).
        """
        return self.max_grad_norm + self.gamma * math.sqrt(self.dimension)
