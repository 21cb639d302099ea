"""Plain Opacus training of a run's configuration, step by step: the peer of the whole product.

Same model, initial parameters, data, sampling rate, Poisson sampling, clipping norm, noise multiplier, divisor, update
rule and learning rates as the run; Opacus samples, clips and adds noise. It has no masks, ring, ledger or evidence.
Opacus knows no versions of a row: here the gradients of an example's versions are averaged before Opacus clips them.
Where nothing is private it is plain torch.
"""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.channel import Channel
from raycloak.coordinator.accounting.opacus_modules import opacus_module
from raycloak.coordinator.aggregation.update_rules import by_terms, learning_rate
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.coordinator.planning.model_source import loss_spec, model_source
from raycloak.coordinator.planning.references import descriptor
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.augmentation import WORDS, Versions
from raycloak.workers.inputs.datasets import dataset_form
from raycloak.workers.models.models import build_model, loss_function, trainable_tensors
from raycloak.workers.terms.built_in_rules import RULES
from raycloak.workers.terms.manifest import OptimizerSpec
from raycloak.workers.terms.mechanism import EXAMPLE, Mechanism


class OpacusTraining:
    """A configuration's training in plain Opacus, in this process.

    Args:
        base: folder that relative paths and ``module:function`` names start from.
        mechanism: of the run's plan.

    Raises:
        ConfigError: ``bench_peer`` for an update rule that torch does not have, normalised clipping, or a
            ``dataset.unit``; as a run for data, model and groups.
    """

    def __init__(self, config: RunConfig, base: Path, mechanism: Mechanism) -> None:
        assert config.dataset is not None, "a peer trains on data that is named"
        if mechanism.clipping != "norm" or mechanism.unit != EXAMPLE:
            raise _no_peer("plain Opacus has neither normalised clipping nor units of rows", "the run without them")
        # Checks of a model choose deterministic kernels; Opacus' users have torch's default.
        torch.set_deterministic_debug_mode("default")
        self._mechanism, self._spec = mechanism, optimizer_spec(config.optimizer, base)
        data = descriptor(config.dataset)
        self._dataset = data.open(base)
        self._versions = None if data.augment is None else Versions(data.augment, dataset_form(self._dataset), base)
        # Follows torch's seed, which Opacus' noise and sampling have too.
        self._words = np.random.default_rng(torch.initial_seed())
        self.module = build_model(model_source(config.model), base, config.seed)
        self._loss, _ = loss_function(loss_spec(config.loss), base)
        self._rule, self._wrapped = _update_rule(self.module, self._spec), self.module
        if mechanism.private:
            # Its own check for buffers would refuse transformers that it computes correctly.
            self._wrapped = opacus_module("opacus").GradSampleModule(self.module, loss_reduction="sum", strict=False)
            self._rule = opacus_module("opacus.optimizers").DPOptimizer(
                self._rule,
                noise_multiplier=mechanism.noise_multiplier,
                max_grad_norm=mechanism.max_grad_norm,
                expected_batch_size=mechanism.expected_batch_size,
                loss_reduction="mean",
            )
        self._batches = self._draws()
        self._step = 0

    def step(self) -> None:
        """Draw a batch, sum its clipped gradients, add noise and update the parameters."""
        for group in self._rule.param_groups:
            group["lr"] = learning_rate(group["terms"], self._step, self._mechanism.steps)
        features, labels = self._dataset.batch(np.asarray(next(self._batches)))
        rows, copies = self._mechanism.micro_batch_rows, self._mechanism.copies
        if self._versions is not None:
            features, labels = np.repeat(features, copies, 0), np.repeat(labels, copies, 0)
            words = self._words.integers(0, 2**64, (len(features), WORDS), np.uint64)
            features = self._versions.of(features, words)
        starts = range(0, len(features), rows)
        for start in starts:
            part = slice(start, start + rows)
            losses = self._loss(self._wrapped(torch.from_numpy(features[part])), torch.from_numpy(labels[part]))
            if not self._mechanism.private:
                losses = losses / (self._mechanism.expected_batch_size * copies)
            losses.sum().backward()  # type: ignore[no-untyped-call]
            if self._mechanism.private and copies > 1:
                for parameter in self._rule.params:
                    parameter.grad_sample = parameter.grad_sample.unflatten(0, (-1, copies)).mean(1)
            # As Opacus' virtual steps clip and add up; the last micro-batch stays for the step itself.
            if self._mechanism.private and start != starts[-1]:
                self._rule.signal_skip_step()
                self._rule.step()
                self._rule.zero_grad()
        self._rule.step()
        self._rule.zero_grad()
        self._step += 1

    def _draws(self) -> Iterator[list[int]]:
        sampler = opacus_module("opacus.utils.uniform_sampler").UniformWithReplacementSampler
        # Without an end: a bench may take more steps than the plan has.
        while True:
            yield from sampler(
                num_samples=self._mechanism.num_examples,
                sample_rate=self._mechanism.sample_rate,
                steps=self._mechanism.steps,
            )


def _update_rule(module: nn.Module, spec: OptimizerSpec) -> Any:
    """Return the run's update rule, as torch has it."""
    if spec.name not in RULES:
        raise _no_peer(f"plain torch has no update rule '{spec.name}'", f"one of {', '.join(RULES)}")
    trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    groups = [
        {"params": [trained[tensor.name] for tensor in members], "weight_decay": terms.weight_decay, "terms": terms}
        for terms, members in by_terms(spec, trainable_tensors(module)).items()
    ]
    rule = RULES[spec.name]
    return getattr(torch.optim, rule.torch_class)(groups, lr=spec.learning_rate, **rule.arguments(spec))


def _no_peer(why: str, instead: str) -> ConfigError:
    return ConfigError("bench_peer", f"{why}.", f"Compare with {instead}.")


class OpacusPeer(Message):
    """A request to train ``config``, a configuration as plain data, with the mechanism of the run's plan."""

    DOMAIN: ClassVar[str] = "raycloak/bench/peer/v1"
    config: dict[str, Any]
    base: Path
    mechanism: Mechanism


class Steps(Message):
    """A request to take so many steps."""

    DOMAIN: ClassVar[str] = "raycloak/bench/steps/v1"
    number: int


class Seconds(Message):
    """The seconds that each step took."""

    DOMAIN: ClassVar[str] = "raycloak/bench/seconds/v1"
    steps: tuple[float, ...]


def take_steps(parent: Channel) -> None:
    """Be the peer's process: train on one core, and answer each number of steps with the seconds that each took."""
    torch.set_num_threads(1)
    # Torch warns of Opacus' hooks at every pass.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    peer = parent.receive(OpacusPeer)
    if peer is None:
        return
    training = OpacusTraining(parse_config(peer.config), peer.base, peer.mechanism)
    parent.send(Seconds(steps=()))
    while (steps := parent.receive(Steps)) is not None:
        parent.send(Seconds(steps=tuple(_seconds(training) for _ in range(steps.number))))


def _seconds(training: OpacusTraining) -> float:
    began = time.perf_counter()
    training.step()
    return time.perf_counter() - began
