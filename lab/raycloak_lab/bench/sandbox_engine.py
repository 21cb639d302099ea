"""A sum engine whose model and loss run in a process behind walls, and its parent's side, which holds the keys.

    parent: keys, draw, rows, noise, masks, tags     child: model, loss, gradients, clipping
        parameters, then each micro-batch  ─────────►
                                           ◄─────────  the clipped sum

Guarantee: the child gets parameters and rows and nothing else; what user code does there is limited by
`raycloak_lab.bench.sandbox_walls.raise_walls`. The vectors have the bytes that they have without walls.

It guards no bound: the child clips, so user code that overwrites the engine can answer any sum. The parent sees no
gradient of a row, and could not tell. Rows are read on the parent's side: code that reads data is outside of the walls.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.gradients.clipping import GradientEngine, MicroBatch
from raycloak.workers.gradients.environment import worker_environment
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.models.models import ModelSource, build_model, loss_function
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.public_sums import PublicSums
from raycloak_lab.bench.sandbox_walls import raise_walls

_START_S: Final = 300.0
_SUM_S: Final = 600.0
"""Bounds a sum of the largest model that the bench has, on a busy machine."""


class SandboxedCode(Message):
    """All that the child builds its engine of.

    Attributes:
        base: folder of the user's code; the child may read it.
    """

    DOMAIN: ClassVar[str] = "raycloak/bench/sandboxed-code/v1"
    model: ModelSource
    loss: LossSpec
    base: Path
    seed: int
    mechanism: Mechanism

    def engine(self) -> GradientEngine:
        """Build the model, its loss and their engine in this process; runs user code."""
        pin_numerics()
        module = build_model(self.model, self.base, self.seed)
        loss_fn, _ = loss_function(self.loss, self.base)
        # Once more: modules of a user may set torch up as they are imported.
        pin_numerics()
        return GradientEngine(module, loss_fn, self.mechanism)


class Built(Message):
    """An answer: the model is built, of tensors of these sizes."""

    DOMAIN: ClassVar[str] = "raycloak/bench/built/v1"
    sizes: tuple[int, ...]


class Sum(Message):
    """A request for the clipped sum at the parameters beside it; `SandboxedRows` follow for each micro-batch."""

    DOMAIN: ClassVar[str] = "raycloak/bench/sum/v1"


class SandboxedRows(Message):
    """One micro-batch beside it: features, labels, valid."""

    DOMAIN: ClassVar[str] = "raycloak/bench/rows/v1"


class Total(Message):
    """The clipped sum beside it, float64 [d]."""

    DOMAIN: ClassVar[str] = "raycloak/bench/total/v1"


class SandboxedEngine:
    """The sum engine of a private mechanism, in a child behind walls. A context manager that ends the child.

    Raises:
        ConfigError: ``sandbox_missing`` or ``sandbox_threads``.
        RaycloakError: as user code is refused without walls.
    """

    def __init__(self, code: SandboxedCode) -> None:
        require_bound(code.mechanism.private, "no sum over public examples leaves the child")
        self._mechanism = code.mechanism
        self.counted: PublicSums | None = None
        with ExitStack() as stack:
            # What it prints goes nowhere: user code could print examples. No thread watches its parent: the walls do.
            child = Child(f"{__name__}:compute", grace_s=None, log=Path("/dev/null"), environment=_environment())
            self._child = stack.enter_context(child)
            self.sizes = child.call(code, Built, by=Deadline(_START_S)).sizes
            require_bound(sum(self.sizes) == self._mechanism.dimension, "a mechanism has the dimension of its model")
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """The child's number."""
        return self._child.pid

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Return the sum that the child states, one piece [d]; see the module for what it may be.

        Raises:
            ProtocolError: ``malformed`` if it is no finite vector of that length.
        """
        by = Deadline(_SUM_S)
        try:
            self._child.send(Sum(), [parameters], by=by)
            for batch in batches:
                self._child.send(SandboxedRows(), batch, by=by)
            found = self._child.receive_frame(Total, by=by).arrays
            # Copied: it is encoded in place, and each page of a mapping that is written costs more than its copy.
            total = np.array(found[0]) if len(found) == 1 else np.empty(0)
            is_vector = total.dtype == np.float64 and total.shape == (self._mechanism.dimension,)
            if not is_vector or not np.isfinite(total).all():
                raise ProtocolError("malformed", "a clipped sum that is no finite vector of the model's dimension")
        except BaseException:
            # It waits for rows that do not come, or is not to be trusted with others.
            self._child.destroy()
            raise
        return [torch.from_numpy(total)]


def compute(parent: Channel) -> None:
    """Be the child: raise the walls, build the engine of the user's code, and answer sums until the parent ends."""
    code = parent.receive(SandboxedCode)
    if code is None:
        return
    raise_walls(code.base.resolve())
    engine = code.engine()
    parent.send(Built(sizes=engine.sizes))
    while (asked := parent.receive_frame(Sum)) is not None:
        (parameters,) = asked.arrays
        pieces = engine.clipped_sum(parameters, _received(parent, code.mechanism.micro_batches))
        parent.send(Total(), [torch.cat(pieces).numpy()])


def _received(parent: Channel, count: int) -> Iterator[MicroBatch]:
    for _ in range(count):
        if (frame := parent.receive_frame(SandboxedRows)) is None:
            raise ProtocolError("malformed", "fewer micro-batches than the mechanism has")
        features, labels, valid = frame.arrays
        yield features, labels, valid


def _environment() -> dict[str, str]:
    """Return the child's whole environment: what makes its bits, and how libraries get along behind the walls."""
    return {
        **worker_environment("default"),
        # Otherwise it starts one for each processor as it is imported.
        "OPENBLAS_NUM_THREADS": "1",
        # Transformers imports torch's compiler, which wants a folder that is there; it writes only as it compiles.
        "TORCHINDUCTOR_CACHE_DIR": "/",
    }
