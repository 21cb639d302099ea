"""The engine and its peers, each as the sum that it makes of one workload.

The peers are for comparison alone: Opacus' hooks and Opacus' ghost clipping as their own optimizers use them, and plain
autograd. The noise is left out everywhere, and no parameter is updated.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycloak.coordinator.accounting.opacus_modules import opacus_module
from raycloak.metrics.errors import ConfigError
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.numerics import choose_kernels
from raycloak.workers.models.models import LossFn, read_flat
from raycloak.workers.terms.mechanism import EXAMPLE, Mechanism
from raycloak_lab.bench.gradient_cases import BenchCase, Features

CLIP: Final = 1.0
UNIT_ROWS: Final = 8
"""The rows of a unit, where rows are taken as units: they are side by side in a micro-batch."""


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """One model and its batch, ready to be summed.

    Attributes:
        module: belongs to the method that gets the workload.
        batches: features [m, ...] and labels [m, ...] of each micro-batch.
        parameters: float32 [d], those of ``module``.
    """

    case: BenchCase
    module: nn.Module
    batches: list[tuple[Features, NDArray[np.int64]]]
    parameters: NDArray[np.float32]
    device: torch.device

    @classmethod
    def of(cls, case: BenchCase, device: torch.device) -> Self:
        """Build a new one."""
        module = case.build().to(device)
        return cls(case, module, case.batches(), read_flat(module), device)

    def trained(self) -> list[nn.Parameter]:
        """Return the trained parameters in canonical order."""
        return [tensor for tensor in self.module.parameters() if tensor.requires_grad]

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Return the batch on the device."""

        def moved(array: NDArray[np.generic]) -> Tensor:
            return torch.tensor(array, device=self.device)

        return [(moved(features), moved(labels)) for features, labels in self.batches]


class Method(Protocol):
    """A way to sum the gradients of a workload, which belongs to it from then on."""

    def __init__(self, work: BenchWorkload) -> None: ...

    def run(self) -> None:
        """Compute the sum of all micro-batches. This is what is measured."""
        ...

    def total(self) -> NDArray[np.float64]:
        """Return the sum of the last run, float64 [d]."""
        ...


class Ours:
    """The product's engine, from NumPy arrays and a parameter vector to a float64 sum, with deterministic kernels."""

    rows_per_unit = 1

    def __init__(self, work: BenchWorkload) -> None:
        rows = np.ones(work.case.rows, np.bool_)
        self._batches = [(features, labels, rows) for features, labels in work.batches]
        self._parameters = work.parameters
        mechanism = bench_mechanism(work.case, len(work.parameters), self.rows_per_unit)
        self._engine = GradientEngine(work.module, work.case.loss_fn, mechanism, work.device)

    def run(self) -> None:
        """Compute the clipped sum."""
        # A worker's process has them for good; here the peers have torch's default.
        choose_kernels(True)
        try:
            self._total = self._engine.clipped_sum(self._parameters, self._batches)
        finally:
            choose_default_kernels()

    def total(self) -> NDArray[np.float64]:
        """Return the clipped sum."""
        return torch.cat(self._total).cpu().numpy()


class OursOfUnits(Ours):
    """The same rows as units of `UNIT_ROWS`, whose mean gradient is clipped."""

    rows_per_unit = UNIT_ROWS


class Plain:
    """Non-private training up to the update: forward, backward, gradients accumulated by autograd."""

    def __init__(self, work: BenchWorkload) -> None:
        self._module, self._loss_fn = work.module, work.case.loss_fn
        self._trained, self._tensors = work.trained(), work.tensors()

    def run(self) -> None:
        """Compute the sum of all gradients, which nothing clips."""
        for tensor in self._trained:
            tensor.grad = None
        for features, labels in self._tensors:
            self._loss_fn(self._module(features), labels).sum().backward()  # type: ignore[no-untyped-call]

    def total(self) -> NDArray[np.float64]:
        """Return the sum."""
        return _flat([tensor.grad for tensor in self._trained])


class OpacusHooks:
    """Opacus' per-example gradients (GradSampleModule), clipped and accumulated by its DPOptimizer."""

    def __init__(self, work: BenchWorkload) -> None:
        self._loss_fn, self._trained, self._tensors = work.case.loss_fn, work.trained(), work.tensors()
        # Its own check for buffers is off: it would refuse models that it computes correctly.
        self._module = opacus_module("opacus.grad_sample").GradSampleModule(
            work.module, batch_first=True, loss_reduction="sum", strict=False
        )
        self._optimizer = _optimizer("DPOptimizer", self._trained)

    def run(self) -> None:
        """Compute the clipped sum as Opacus does for a logical batch of several physical ones."""
        _forget_sums(self._trained)
        for features, labels in self._tensors:
            self._optimizer.zero_grad(set_to_none=True)
            self._loss_fn(self._module(features), labels).sum().backward()  # type: ignore[no-untyped-call]
            _accumulate(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)

    def total(self) -> NDArray[np.float64]:
        """Return the clipped sum."""
        return _flat([tensor.summed_grad for tensor in self._trained])  # type: ignore[attr-defined]


class OpacusGhost:
    """Opacus' ghost clipping: a backward pass for the norms, and another for the sum of the scaled losses."""

    def __init__(self, work: BenchWorkload) -> None:
        self._trained, self._tensors = work.trained(), work.tensors()
        self._module = opacus_module("opacus.grad_sample").GradSampleModuleFastGradientClipping(
            work.module, batch_first=True, loss_reduction="sum", strict=False, max_grad_norm=CLIP
        )
        self._optimizer = _optimizer("DPOptimizerFastGradientClipping", self._trained)
        clipping = opacus_module("opacus.utils.fast_gradient_clipping_utils")
        self._criterion = clipping.DPLossFastGradientClipping(
            self._module, self._optimizer, _Criterion(work.case.loss_fn), "sum"
        )

    def run(self) -> None:
        """Compute the clipped sum as Opacus does for a logical batch of several physical ones."""
        _forget_sums(self._trained)
        for features, labels in self._tensors:
            self._optimizer.zero_grad(set_to_none=True)
            self._criterion(self._module(features), labels).backward()
            _accumulate(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)

    def total(self) -> NDArray[np.float64]:
        """Return the clipped sum."""
        return _flat([tensor.summed_grad for tensor in self._trained])  # type: ignore[attr-defined]


METHODS: Final[Mapping[str, Callable[[BenchWorkload], Method]]] = MappingProxyType(
    {"ours": Ours, "units": OursOfUnits, "opacus": OpacusHooks, "ghost": OpacusGhost, "plain": Plain}
)


@dataclass(frozen=True, slots=True)
class ExactSums:
    """The sums of the clipped gradients of rows and of units, and of the gradients as they are: float64 [d]."""

    clipped: NDArray[np.float64]
    units: NDArray[np.float64]
    plain: NDArray[np.float64]


def exact_sums(work: BenchWorkload) -> ExactSums:
    """Compute the sums in float64 on the CPU: autograd on one example at a time, and nothing else."""
    module = copy.deepcopy(work.module).cpu().double()
    trained = [tensor for tensor in module.parameters() if tensor.requires_grad]
    clipped, units, plain = (np.zeros(len(work.parameters)) for _ in range(3))

    def clip(gradient: NDArray[np.float64]) -> NDArray[np.float64]:
        return gradient * min(1.0, CLIP / float(np.linalg.norm(gradient)))

    for features, labels in work.batches:
        inputs, targets = torch.tensor(features), torch.tensor(labels)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        of_unit = np.zeros_like(plain)
        for row in range(len(inputs)):
            loss = work.case.loss_fn(module(inputs[row : row + 1]), targets[row : row + 1]).sum()
            gradient = _flat(torch.autograd.grad(loss, trained))
            clipped += clip(gradient)
            plain += gradient
            of_unit += gradient / UNIT_ROWS
            if (row + 1) % UNIT_ROWS == 0:
                units += clip(of_unit)
                of_unit[:] = 0
    return ExactSums(clipped, units, plain)


def choose_default_kernels() -> None:
    """Let torch choose kernels as it does by default, which is what the peers' users have."""
    torch.set_deterministic_debug_mode("default")


class _Criterion:
    """A loss in the form in which Opacus takes one."""

    reduction = "sum"

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        assert self.reduction == "none", "ghost clipping asks for one loss per example"
        return self._loss_fn(output, labels)


def _optimizer(name: str, trained: list[nn.Parameter]) -> Any:
    """Return that optimizer of Opacus around an SGD that is never stepped."""
    return getattr(opacus_module("opacus.optimizers"), name)(
        torch.optim.SGD(trained, lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=None,
        loss_reduction="sum",
    )


def _accumulate(optimizer: Any) -> None:
    """Clip and add up; as Opacus' BatchMemoryManager does, end the step before noise and update."""
    optimizer.signal_skip_step(do_skip=True)
    optimizer.step()


def _forget_sums(trained: list[nn.Parameter]) -> None:
    for tensor in trained:
        tensor.summed_grad = None  # type: ignore[attr-defined]


def _flat(tensors: Any) -> NDArray[np.float64]:
    return np.concatenate([tensor.detach().double().cpu().numpy().reshape(-1) for tensor in tensors])


def bench_mechanism(case: BenchCase, dimension: int, rows_per_unit: int = 1) -> Mechanism:
    """Return a mechanism of the case's shape; its accounting has no say in a clipped sum.

    Raises:
        ConfigError: ``bench_input`` if the rows of a micro-batch are no whole units.
    """
    if case.rows % rows_per_unit:
        raise ConfigError(
            "bench_input", f"{case.rows} rows are no units of {rows_per_unit}.", "Leave the peer 'units' out."
        )
    examples = case.rows // rows_per_unit * case.micro_batches
    return Mechanism(
        private=True,
        num_examples=examples,
        virtual_workers=1,
        sample_rate=1.0,
        steps=1,
        max_grad_norm=CLIP,
        noise_multiplier=1.0,
        honest_share=1.0,
        expected_batch_size=float(examples),
        dimension=dimension,
        ring_bits=32,
        gamma_log2=-20,
        clamp=100.0,
        sigma=2.0**21,
        unit=EXAMPLE if rows_per_unit == 1 else "unit",
        rows_per_unit=rows_per_unit,
        micro_batch_size=case.rows // rows_per_unit,
        micro_batches=case.micro_batches,
        overflow_probability=0.0,
    )
