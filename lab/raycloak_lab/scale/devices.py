"""The GPUs of a worker in the prediction of a step: memory, and the least time that their rates allow.

A rate is stated, or a vendor's for a card of that name; nothing is predicted from a rate that nobody states. A vendor's
rates are peaks, which no program reaches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pydantic import Field, field_validator

from raycloak.coordinator.config.section import Section
from raycloak.workers.terms.mechanism import Mechanism
from raycloak_lab.scale.large_models import GpuBytes, LargeModel

FLOAT_BYTES: Final = 4
"""Parameters, gradients and moments travel and are kept as float32."""
SUM_BYTES: Final = 8
"""Clipped sums are added in float64."""
_TRAINED_OPERATIONS: Final = 6
"""For each token and parameter of a matrix: a product and a sum forward, for its input, and for its own gradient."""
_FROZEN_OPERATIONS: Final = 4
"""A frozen matrix has no gradient of its own."""
_RECOMPUTED_OPERATIONS: Final = 2
"""A checkpointed block runs forward once more."""


@dataclass(frozen=True, slots=True)
class Card:
    """The figures that a vendor states of a card.

    Attributes:
        memory_gb: 10^9 bytes. copy_gb_per_s: of its memory, read and written together.
        tflop_per_s: 10^12 operations a second in dense bfloat16 products.
        source: where the vendor states them.
    """

    memory_gb: float
    copy_gb_per_s: float
    tflop_per_s: float
    source: str


CARDS: Final[Mapping[str, Card]] = MappingProxyType(
    {
        "NVIDIA A100-SXM4-80GB": Card(80, 2039, 312, "NVIDIA A100 Tensor Core GPU, data sheet"),
        "NVIDIA L40S": Card(48, 864, 362, "NVIDIA L40S, data sheet"),
        # The next three have half of what their sheets state for products with sparsity.
        "NVIDIA H100 PCIe": Card(80, 2000, 756, "NVIDIA H100 Tensor Core GPU, data sheet"),
        "NVIDIA H100 80GB HBM3": Card(80, 3350, 989, "NVIDIA H100 Tensor Core GPU, data sheet"),
        "NVIDIA H200": Card(141, 4800, 989, "NVIDIA H200 Tensor Core GPU, data sheet"),
    }
)
"""By the name that torch and nvidia-smi tell."""


class DeviceConfig(Section):
    """Each GPU of a worker.

    A rate that is not given is the card's. Without either nobody knows it, and nothing is predicted from it.

    Attributes:
        card: a name in `CARDS`.
        memory_gb, copy_gb_per_s: as of `Card`; ``bench words --device cuda`` measures the second.
        tflop_per_s: of products in the run's precision.
    """

    card: str | None = None
    memory_gb: float | None = Field(default=None, gt=0)
    copy_gb_per_s: float | None = Field(default=None, gt=0)
    tflop_per_s: float | None = Field(default=None, gt=0)

    @field_validator("card")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in CARDS:
            raise ValueError(f"give the rates of another card than {', '.join(CARDS)}")
        return name

    def rate(self, name: str) -> float | None:
        """Return a rate by its name in `Card`: the stated one, the card's, or None if nobody knows it."""
        stated: float | None = getattr(self, name)
        if stated is not None or self.card is None:
            return stated
        found: float = getattr(CARDS[self.card], name)
        return found


@dataclass(frozen=True, slots=True)
class DeviceScale:
    """The GPUs of a worker in a step.

    Attributes:
        gpus: their number.
        fullest: the one that takes the most; without a model, its micro-batches are unknown and zero here.
        words_bytes: of the ring words on it. memory_bytes: all together, at their peak. limit_bytes: of the GPU.
        words_seconds: at least, for encoding, noise, sums, hashes and masks, which read and write its memory.
        model_seconds: at least, for the products of all rows, if every parameter is one of a matrix.
        sources: of the rates. A figure is None where nobody knows its rate.
    """

    gpus: int
    fullest: GpuBytes
    words_bytes: float
    memory_bytes: float
    limit_bytes: float | None
    words_seconds: float | None
    model_seconds: float | None
    sources: tuple[str, ...]


def device_scales(
    config: DeviceConfig, mechanism: Mechanism, hosted: int, model: LargeModel | None
) -> tuple[DeviceScale, ...]:
    """Return the GPUs of a worker that hosts so many virtual workers, for each number that the model is laid over."""
    if model is None:
        size = mechanism.dimension
        alone = GpuBytes(size, frozen=0, parameters=FLOAT_BYTES * size, sums=SUM_BYTES * size, micro_batches=0)
        return (_device_scale(config, mechanism, hosted, [alone], None),)
    return tuple(_device_scale(config, mechanism, hosted, each, model) for each in model.by_gpus.values())


def _device_scale(
    config: DeviceConfig, mechanism: Mechanism, hosted: int, gpus: Sequence[GpuBytes], model: LargeModel | None
) -> DeviceScale:
    word = mechanism.ring_bits // 8
    earlier = word if hosted > 1 else 0

    def peak(gpu: GpuBytes) -> float:
        # Words are made when the micro-batches are gone. The sum of earlier vectors is there all the time.
        beside = max(gpu.micro_batches, word * gpu.trained)
        return gpu.frozen + gpu.parameters + gpu.sums + earlier * gpu.trained + beside

    fullest = max(gpus, key=peak)
    # Each vector: the sum is read, zeroed, and becomes words, which are hashed. Then all but the first are added, and
    # the sum is copied under masks.
    moved = hosted * (2 * SUM_BYTES + 2 * word) + (hosted - 1) * 3 * word + 2 * word
    memory, copy, products = (config.rate(name) for name in ("memory_gb", "copy_gb_per_s", "tflop_per_s"))
    rates = ("memory_gb", "copy_gb_per_s", "tflop_per_s")
    sources = [f"{name.replace('_', ' ')}: stated" for name in rates if getattr(config, name) is not None]
    if config.card is not None and len(sources) < len(rates):
        sources.append(f"{config.card}: {CARDS[config.card].source}")
    tokens = hosted * mechanism.micro_batches * mechanism.micro_batch_size * (model.tokens if model else 0)
    operations = _operations(model) * tokens if model else None
    return DeviceScale(
        gpus=len(gpus),
        fullest=fullest,
        words_bytes=(word + earlier) * fullest.trained,
        memory_bytes=peak(fullest),
        limit_bytes=None if memory is None else memory * 1e9,
        words_seconds=None if copy is None else moved * max(each.trained for each in gpus) / (copy * 1e9),
        model_seconds=None if products is None or operations is None else operations / (products * 1e12 * len(gpus)),
        sources=tuple(sources),
    )


def _operations(model: LargeModel) -> int:
    """Return the operations of a token."""
    again = _RECOMPUTED_OPERATIONS if model.recomputed else 0
    return (_TRAINED_OPERATIONS + again) * model.trained + (_FROZEN_OPERATIONS + again) * model.frozen
