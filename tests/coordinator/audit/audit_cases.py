"""A small audited run, and the real classes with one defect each.

A defect replaces a method of a product class for the time of a test, in every actor of the run at once, so that the
run is admitted, agrees with itself and ends: nothing but the audit can tell.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT, mixed_norm
from raycloak.attestation.core.keys import Purpose, derive
from raycloak.attestation.keys.release import KeyContract
from raycloak.coordinator.audit import audit as audit_module
from raycloak.coordinator.audit.audit import AuditResult, audit
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.planning import dry_run, plan
from raycloak.workers import virtual_worker, workload
from raycloak.workers.device.words import CpuWords
from raycloak.workers.gradients import clipping, taps
from raycloak.workers.gradients.clipping import ClippedSum
from raycloak.workers.gradients.row_places import SilentRows
from raycloak.workers.run_member import RunMember
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.protocol import examples, secret_file

EXAMPLES = 200
PATIENTS = np.repeat(np.arange(40), [2, 3, 5, 10] * 10)
"""Of each example, the patient that it is of."""
OF_PATIENTS = {
    "dataset": {
        "kind": "npz",
        "path": "examples.npz",
        "features": "features",
        "unit": "patient",
        "rows_per_unit": 8,
    },
    "expected_batch_size": 20,
}
"""Fields of an audit that protects patients, at the sampling rate of one that protects examples."""
DELTA = 1e-12
SOLVED = {(0.5, 1.0, 4): 7.59826}
"""Noise that keeps so many rounds at this sampling rate within epsilon; at such a rate solving takes seconds."""
FALSE_ALARM = 3e-8
"""Chance that one audit of a correct build is flagged; thirty audits together stay below 1e-6."""


def small_config(
    *,
    sample_rate: float = 0.5,
    epsilon: float = 1.0,
    steps: int = 4,
    virtual_workers: int = 16,
    bands: int = 1,
    **fields: object,
) -> RunConfig:
    """Return two workers on 200 examples. A small delta: its share of the p-value grows with the number of canaries.

    With bands, the noise of all ``steps`` is correlated, and ``sample_rate`` is of a part.
    """
    noise = None if "measurements" in fields else SOLVED.get((sample_rate, epsilon, -(-steps // bands)))
    dial = {"noise_multiplier": noise, "epsilon_cap": epsilon} if noise else {"target_epsilon": epsilon}
    correlated = {"noise": {"correlated": "auto", "bands": bands}} if bands > 1 else {}
    raw: dict[str, object] = {
        "num_workers": 2,
        "virtual_workers": virtual_workers,
        "steps": steps,
        "expected_batch_size": sample_rate * EXAMPLES / bands,
        "micro_batch_size": 512,
        "model": "tests.models:small_model",
        "dataset": {"kind": "npz", "path": "examples.npz", "features": "features"},
        "optimizer": {"learning_rate": 0.5, "momentum": 0.9},
        "dp_config": {**dial, **correlated, "target_delta": DELTA, "accountant": "rdp"},
    }
    return parse_config({**raw, **fields})


def coins_of(seed: int, canaries: int) -> np.ndarray:
    """Return fair coins."""
    return np.random.default_rng(seed).random(canaries) < 0.5


def audited(
    home: Path, seed: int, canaries: int = 1000, confidence: float = 1 - FALSE_ALARM, **settings
) -> AuditResult:
    """Return the audit of :func:`small_config`, with coins and keys of ``seed``.

    Keys would depend on the ledger, too, and an audit has one of its own each time.
    """
    home.mkdir(exist_ok=True)
    features, labels = examples(EXAMPLES)
    np.savez(home / "examples.npz", features=features, labels=labels, patient=PATIENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyContract, "key_context", digest(b"audit"))
        return audit(
            small_config(**settings),
            home,
            canaries=canaries,
            confidence=1 - FALSE_ALARM,
            coins=coins_of(seed, canaries),
            run_secret=secret_file(home, f"{seed:064x}"),
        )


def without_noise(monkeypatch):
    monkeypatch.setattr(NoiseSampler, "add_to", lambda self, vector, key, **_: None)


def noise_of_one_virtual_worker_only(monkeypatch):
    genuine = VirtualWorkerComputer.vector

    def vector(self, v, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            if v:
                without_noise(patch)
            return genuine(self, v, *arguments)

    monkeypatch.setattr(VirtualWorkerComputer, "vector", vector)


LONG_COLUMN = (1, 3, 4, 4, 4, 4, 4, 3, 1)
"""Coefficients of norm 10. Those for plain SGD have one of 2.3 at most, so noise without it is little too small."""


def coefficients_of_a_long_column(monkeypatch):
    """No defect: noise of any coefficients is private that is made for their norm."""
    monkeypatch.setattr(plan, "chosen_coefficients", lambda *_: tuple(COEFFICIENT_UNIT * each for each in LONG_COLUMN))


def noise_without_the_norm_of_the_coefficients(monkeypatch):
    genuine, sampler = CpuWords.mixed, NoiseSampler.__init__

    def mixed(self, sums, mechanism, noise, start=0):
        norm = float(mixed_norm(mechanism.coefficients))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NoiseSampler, "__init__", lambda self, sigma, bits: sampler(self, sigma / norm, bits))
            return genuine(self, sums, mechanism, noise, start)

    monkeypatch.setattr(CpuWords, "mixed", mixed)


def sigma_divided_by_virtual_workers_once_more(monkeypatch, virtual_workers=16):
    genuine = NoiseSampler.__init__
    monkeypatch.setattr(
        NoiseSampler, "__init__", lambda self, sigma, bits: genuine(self, sigma / virtual_workers, bits)
    )


class Unclipped(ClippedSum):
    """A clipping that adds gradients as they are."""

    def __init__(self, sizes, clip, device, normalised):
        super().__init__(sizes, None, device)
        self._clip = clip
        self._valid = 0


class ClippedAverage(Unclipped):
    """A clipping of the average of a virtual worker's batch instead of each example, made a sum again."""

    def add(self, gradients, valid):
        super().add(gradients, valid)
        self._valid += int(valid.sum())

    def pieces(self):
        average = torch.cat(super().pieces()) / max(self._valid, 1)
        return [average * min(1.0, self._clip / max(float(average.norm()), 1e-30)) * self._valid]


def clipping_after_averaging(monkeypatch):
    monkeypatch.setattr(clipping, "ClippedSum", ClippedAverage)


def one_worker_that_does_not_clip(monkeypatch):
    genuine = RunMember._compute

    def compute(self, *arguments):
        with monkeypatch.context() as patch:
            if self._attester.member_id == "worker-0":
                patch.setattr(clipping, "ClippedSum", Unclipped)
            genuine(self, *arguments)

    monkeypatch.setattr(RunMember, "_compute", compute)


def clipping_rows_in_the_place_of_their_unit(monkeypatch):
    genuine = ClippedSum.add

    def add(self, parts, valid):
        genuine(self, parts, valid.repeat_interleave(len(parts[0].squares()) // len(valid)))

    monkeypatch.setattr(taps, "grouped", lambda use, rows_per_unit: use)
    monkeypatch.setattr(taps.Recording, "_units", property(lambda self: self._count))
    monkeypatch.setattr(ClippedSum, "add", add)


def noise_key_reused_across_steps(monkeypatch):
    def forgetful(secret, purpose, *context):
        """Key noise by the digest of the slice alone, which comes last."""
        return derive(secret, purpose, *(context[-1:] if purpose == Purpose.NOISE else context))

    monkeypatch.setattr(virtual_worker, "derive", forgetful)


class SortedBySize(nn.Module):
    """Sorts the rows, and puts them back behind its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.abs().sum(1).argsort(descending=True)
        return self.head(torch.tanh(self.first(x[order]))[order.argsort()])


def sorted_model() -> nn.Module:
    return SortedBySize()


def checks_that_find_nothing(monkeypatch):
    for caller in (workload, dry_run, audit_module):
        for check in ("check_trainable", "check_rows", "check_released"):
            monkeypatch.setattr(caller, check, lambda *_: None, raising=False)
    monkeypatch.setattr(SilentRows, "meet", lambda self, name, gradient: None)


def every_example_in_every_batch(monkeypatch):
    draw, choose = virtual_worker.draw_ids, plan.choose_batch

    def whole(config, terms):
        """Hold a whole slice, so that nothing is cut."""
        batch = choose(config, terms)
        return replace(batch, units=-(-terms.num_examples // batch.virtual_workers), batches=1)

    monkeypatch.setattr(virtual_worker, "draw_ids", lambda key, ids, rate, capacity: draw(key, ids, 1.0, capacity))
    monkeypatch.setattr(plan, "choose_batch", whole)
