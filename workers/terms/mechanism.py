"""The frozen privacy mechanism: sampling or sending, clipping, encoding, noise and accounting in one object.

Sampler, clipper, encoder, noise and ledger event are all built from a :class:`Mechanism`; none takes a loose q, z
or C. Hosting and speed settings are not fields, so they cannot change its digest.

Whoever reads a mechanism checks it: ledger, worker, owner of data and auditor. A number that no proof is for, or noise
that the shares do not add up to, is no mechanism.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from raycloak.attestation.core.counted_noise import MOST_BANDS, NoiseTerms, are_coefficients, sensitivity_of
from raycloak.attestation.core.messages import Message
from raycloak.attestation.core.roster import Query
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.vectors.noise import MAX_SIGMA, MIN_SIGMA
from raycloak.workers.vectors.ring import RingDemand, RingSpec

# These carry the derivation in `workers/gradients/clipping.py`: a change of one needs a new derivation.
MAX_DIMENSION = 2**34
MIN_CLIP, MAX_CLIP = 2.0**-100, 2.0**100

# Every whole number up to here is a float.
_MAX_COUNT = 2**53

Clipping = Literal["norm", "normalised"]

EXAMPLE, ROW = "example", "row"
"""The unit of data without another, and what an account calls it. No column has these names."""


def _public_name(unit: str) -> str:
    if unit == ROW or not unit.isprintable() or unit != unit.strip():
        raise ValueError("a unit has a printable name, without space around it, that is neither example nor row")
    return unit


UnitName = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_public_name)]
"""The public name of what epsilon protects: it is in verdicts, in reports and in the ledger."""


class UnitTerms(NamedTuple):
    """The unit that epsilon protects as a whole, as :class:`Mechanism` has it.

    Attributes:
        unit: its public name.
        rows_per_unit: k, the most rows of one that a step computes, with their versions.
        copies: versions of each row among them.
    """

    unit: str = EXAMPLE
    rows_per_unit: int = 1
    copies: int = 1


AccountantName = Literal["rdp", "pld"]
"""Accountants that can hold a cap: Renyi differential privacy, or privacy loss distributions."""


_SHARED = (
    "unit",
    "rows_chosen",
    "num_examples",
    "virtual_workers",
    "honest_share",
    "accountant",
    "max_participations",
)


class Mechanism(NoiseTerms, Message):
    """A Gaussian sum query over sampled or sent examples, repeated ``steps`` times, in an integer ring.

    Guarantee: every number is within the bounds that its proof needs, and a private mechanism has the noise that it
    claims: ``V·h·sigma² >= (z·C'/gamma)² + 4``, with ``V·(1 - h)`` virtual workers, a whole number, left out. A copy by
    ``model_copy``, or one that was unpickled, is checked by `raycloak.attestation.core.messages.checked` alone.

    Attributes:
        query: the quantity of an example that is summed.
        private: False only for data declared public; then nothing is clipped or noised.
        unit: what is sampled, clipped and protected as a whole: an ``example``, or all rows of the data with one value
            in the column of this name. The fields below count units, and so do proofs; see docs/proofs/012-units.md.
        rows_per_unit: k, the most rows of a unit that a step computes. 1, and then left out of the bytes, by default.
        copies: random versions of each row that are among them; see `raycloak.workers.inputs.augmentation`. 1, and
            then left out of the bytes, by default.
        adjacency: neighbours differ by one unit contributing zero, ids and keys stay.
        num_examples: N, public: of the dataset, or of data that a client sends, the most examples of one step.
        virtual_workers: V; unit i belongs to virtual worker i mod V.
        sample_rate: q; unit i is drawn iff its 64-bit draw is below q * 2^64. 1 of sent data: all of it is used. Where
            noise is correlated, q is of the part of the units that a step draws from.
        steps: number of releases the noise was planned for.
        max_grad_norm: C, the l2 bound of one unit's contribution before encoding.
        noise_multiplier: z, standard deviation of the counted noise in units of ``sensitivity``, which with correlated
            noise is of all b releases that a unit's contribution is mixed into.
        honest_share: h, the share of virtual workers whose noise is counted on, in (0, 1]: (V - k)/V.
        expected_batch_size: the public divisor of the released sum.
        dimension: d, number of coordinates.
        ring_bits, gamma_log2: the ring Z_{2^ring_bits} with grid step gamma = 2^gamma_log2.
        clamp: K, bound of each coordinate of one virtual worker's sum.
        sigma: standard deviation of one virtual worker's noise, in ring units.
        micro_batch_size, micro_batches: fixed physical shape m and count M; at most m*M units are used, whose m*M*k
            rows are always computed.
        overflow_probability: eta, bound on the chance that any draw of the run exceeds m*M and is cut, for which delta
            pays. 0 if epsilon pays: the accountant then composes the cut mechanism itself.
        mask_split_probability: bound on the chance that in any attempt of the run the masks of the honest workers fall
            apart, for which delta pays once, with the gradient. 0 where all pairs mask, and then left out of the bytes.
        accountant: which accountant holds the cap.
        max_participations: k of sent data: most releases that one example takes part in, whoever chooses them. None for
            a dataset, every example of which may take part in every release, and then left out of the bytes.
        clipping: whether gradients longer than C are shortened to it (``norm``, then left out of the bytes), or all are
            brought near it (``normalised``); see `raycloak.workers.gradients.clipping.ClippedSum`.

    With b ``coefficients``, step t draws from the units of part ``t mod b`` of each slice alone, and releases
    ``Σ_j c_j s_(t-j)`` of the sums since its key epoch began, with noise of its own.
    """

    DOMAIN: ClassVar[str] = "raycloak/mechanism/v1"

    query: Query = "gradient"
    unit: UnitName = EXAMPLE
    rows_per_unit: int = Field(default=1, exclude_if=lambda rows: rows == 1)
    copies: int = Field(default=1, exclude_if=lambda copies: copies == 1)
    adjacency: Literal["zero_out"] = "zero_out"
    num_examples: int
    sample_rate: float
    steps: int
    expected_batch_size: float
    ring_bits: Literal[32, 64]
    clamp: float
    micro_batch_size: int
    micro_batches: int
    overflow_probability: float
    mask_split_probability: float = Field(default=0.0, exclude_if=lambda chance: chance == 0)
    accountant: AccountantName = "rdp"
    max_participations: int | None = Field(default=None, gt=0, exclude_if=lambda bound: bound is None)
    clipping: Clipping = Field(default="norm", exclude_if=lambda clipping: clipping == "norm")

    @model_validator(mode="after")
    def _sent_examples_are_all_used(self) -> Self:
        if self.max_participations is not None and (self.sample_rate != 1 or not self.private):
            raise ValueError("examples that a client sends are private, and none is left to chance")
        if self.max_participations is not None and (self.unit, self.rows_per_unit) != (EXAMPLE, 1):
            raise ValueError("an example that a client sends is a unit of its own")
        return self

    @model_validator(mode="after")
    def _is_within_bounds(self) -> Self:
        """Raise ProtocolError ``mechanism_bounds`` for the first bound that does not hold."""
        # One after the other: the last ones compute with what the first ones have bounded.
        for name, bound, holds in self._bounds():
            if not holds:
                raise ProtocolError(
                    "mechanism_bounds",
                    f"a mechanism of query {self.query} has {name} {getattr(self, name)}: {bound}.",
                    "Plan the run again with this version; no proof covers such a mechanism.",
                )
        return self

    def _bounds(self) -> Iterator[tuple[str, str, bool]]:
        """Yield a field, what is asked of it, and whether it is so."""
        of_units = ("num_examples", "rows_per_unit", "copies")
        counts = (*of_units, "virtual_workers", "steps", "micro_batch_size", "micro_batches")
        for name in counts:
            yield name, "it must be in [1, 2^53]", 1 <= getattr(self, name) <= _MAX_COUNT
        yield "copies", "it must divide the rows of a unit", self.rows_per_unit % self.copies == 0
        yield "sample_rate", "it must be in (0, 1]", 0 < self.sample_rate <= 1
        yield "max_grad_norm", "it must be in [2^-100, 2^100]", MIN_CLIP <= self.max_grad_norm <= MAX_CLIP
        yield "expected_batch_size", "it must be above 0", self.expected_batch_size > 0
        yield "dimension", "it must be in [1, 2^34]", 1 <= self.dimension <= MAX_DIMENSION
        for name in ("overflow_probability", "mask_split_probability"):
            yield name, "it must be in [0, 1)", 0 <= getattr(self, name) < 1
        of_gradients = self.private and self.query == "gradient"
        yield "clipping", "only gradients that are private are normalised", self.clipping == "norm" or of_gradients
        asked = f"the first must be 2^16, the others in [0, 2^18], and there must be 2 to {MOST_BANDS}"
        yield "coefficients", asked, are_coefficients(self.coefficients)
        alone = not self.coefficients or (of_gradients and self.max_participations is None)
        yield "coefficients", "only gradients over a dataset that is private are mixed", alone
        parted = self.bands == 1 or self.bands <= self.num_examples // self.virtual_workers
        yield "coefficients", "each slice must have a unit for each of them", parted
        yield "honest_share", "it must be in (0, 1]", 0 < self.honest_share <= 1
        whole = self.honest_share == honest_share_of(self.virtual_workers, self.uncounted_shares)
        yield "honest_share", "it must leave out a whole number of virtual workers", whole
        if self.private:
            yield "noise_multiplier", "it must be above 0", self.noise_multiplier > 0
            yield "sigma", "it must be in [2^4, 2^40]", MIN_SIGMA <= self.sigma <= MAX_SIGMA
        spec = RingSpec(self.ring_bits, self.gamma_log2, self.clamp)
        held = spec.holds(self.virtual_workers, self.sigma if self.private else 0.0, self.coefficients)
        yield "clamp", "the ring does not hold the sum of so many of them on this grid", held
        if self.private:
            demand = RingDemand(
                max_grad_norm=self.max_grad_norm,
                clamp=self.clamp,
                dimension=self.dimension,
                virtual_workers=self.virtual_workers,
                noise_multiplier=self.noise_multiplier,
                honest_share=self.honest_share,
                coefficients=self.coefficients,
            )
            pays = demand.is_paid_by(self.sigma, self.gamma_log2)
            yield "sigma", "it does not pay for the noise that is claimed on this grid", pays

    @property
    def uncounted_shares(self) -> int:
        """The number of virtual workers whose noise is not counted on."""
        # A whole number, but for the rounding of its share.
        return round(self.virtual_workers * (1 - self.honest_share))

    def participations(self, releases: int) -> int:
        """Return how many of so many releases one example can take part in, and so how many it is charged for.

        Guarantee: the charge of each release beyond the bound is zero, whichever releases an example took part in
        (docs/proofs/009). Of b consecutive releases with correlated noise, a unit takes part in one
        (docs/proofs/013).
        """
        rounds = -(-releases // self.bands)
        return rounds if self.max_participations is None else min(rounds, self.max_participations)

    @property
    def bands(self) -> int:
        """The b of correlated noise: how many steps a sum is mixed into, and parts that a slice has; 1 without."""
        return max(1, len(self.coefficients))

    @property
    def largest_part(self) -> int:
        """The most units that a virtual worker draws from in one step."""
        return -(-self.num_examples // (self.virtual_workers * self.bands))

    def expected_passes(self) -> float:
        """Return how often all steps are expected to draw a unit."""
        return self.steps * self.sample_rate / self.bands

    @property
    def rows_chosen(self) -> int:
        """The most rows of the data that a step takes of a unit: k without their versions."""
        return self.rows_per_unit // self.copies

    @property
    def micro_batch_rows(self) -> int:
        """The rows that are computed at once: k of each of the m units."""
        return self.micro_batch_size * self.rows_per_unit

    @property
    def gamma(self) -> float:
        """The grid step: the real value of one ring unit."""
        return math.ldexp(1.0, self.gamma_log2)

    @property
    def sensitivity(self) -> float:
        """C' = C + gamma * sqrt(d), the l2 bound of one example's effect on the encoded sum.

        Nearest rounding moves each coordinate by at most half a unit for either neighbour. Float slack is not
        added here: clipping aims below C by more than every rounding error (see `workers/gradients/clipping.py`).
        With correlated noise it is the bound of all releases that the sum is mixed into, together.
        """
        return sensitivity_of(self.max_grad_norm, self.gamma, self.dimension, self.coefficients)

    @property
    def inflation(self) -> float:
        """The share of the sensitivity that rounding adds: C'/C - 1, of the same mix of sums without rounding."""
        return self.sensitivity / sensitivity_of(self.max_grad_norm, 0.0, self.dimension, self.coefficients) - 1


def honest_share_of(virtual_workers: int, uncounted: int) -> float:
    """Return h if the noise of ``uncounted`` virtual workers is not counted on.

    Guarantee: ``virtual_workers * h`` is at most the number of the others, in exact arithmetic.
    """
    share = (virtual_workers - uncounted) / virtual_workers
    above = virtual_workers * Fraction(share) > virtual_workers - uncounted
    return math.nextafter(share, 0.0) if above else share


def check_together(mechanisms: Sequence[Mechanism]) -> None:
    """Require that mechanisms may be of one run, the gradient's first.

    Guarantee: all of them count the same units, virtual workers, shares of noise and participations. Workers take
    these from the gradient's mechanism; another number would claim noise that nobody adds.

    Raises:
        ProtocolError: ``mechanism_bounds``.
    """
    queries = [each.query for each in mechanisms]
    if queries[:1] != ["gradient"] or len(set(queries)) != len(queries):
        raise _apart("a run has one mechanism of each query, the gradient's first.")
    first, *others = mechanisms
    if first.bands > 1 and others:
        raise _apart("a run whose noise is correlated makes no measurement.")
    for other in others:
        for name in _SHARED:
            if getattr(other, name) != getattr(first, name):
                raise _apart(f"the mechanism of {other.query} has another {name} than the gradient's.")
        if other.mask_split_probability:
            raise _apart(f"the mechanism of {other.query} pays for masks, which the gradient's does.")


def _apart(why: str) -> ProtocolError:
    return ProtocolError(
        "mechanism_bounds", why, "Plan the run again with this version; no proof covers such mechanisms."
    )
