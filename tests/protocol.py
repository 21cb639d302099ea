"""A small run that the protocol's tests share: by hand, message by message, or whole in one process.

The model has 83 parameters in four tensors, the data 40 examples in 8 slices, sampled at rate 1/2.
"""

import atexit
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.keys import IdentityKey, Purpose, Secret, derive
from raycloak.attestation.core.lineage import ModelPoint, SignedStep
from raycloak.attestation.core.messages import Envelope, parse, seal
from raycloak.attestation.core.roster import Member, Roster
from raycloak.attestation.keys.release import RunKeys, VirtualWorkerKeys
from raycloak.attestation.keys.run_secret import run_id_of
from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.aggregation.aggregator import MaskedAggregator, ReduceReport, ReduceRequest
from raycloak.coordinator.aggregation.ranges import split_ranges
from raycloak.coordinator.cluster.backend import ActorLost, LocalBackend, Settled
from raycloak.coordinator.cluster.remote import Actor, Worker
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.membership.members import Departure, Timer
from raycloak.coordinator.planning.listed_code import listed_code
from raycloak.coordinator.planning.manifest import build_computation, build_manifest, epochs, run_terms
from raycloak.coordinator.planning.model_source import compute_mode, loss_spec, micro_batch_bytes, model_source
from raycloak.coordinator.planning.plan import keys_per_machine, make_plan, plan_mechanism
from raycloak.coordinator.planning.references import descriptor, sealed_terms, split_of_workers
from raycloak.coordinator.record.folder import RunFolder, RunRecord
from raycloak.coordinator.record.outcome import Finished
from raycloak.coordinator.runs.local_session import local_session
from raycloak.coordinator.runs.verdict import run_facts
from raycloak.coordinator.training.assignment import Assignment, NewRun, Order, Session
from raycloak.coordinator.training.evaluation import public_evaluation
from raycloak.coordinator.training.pace import OPEN, Pace
from raycloak.coordinator.training.phases import Coordinator
from raycloak.coordinator.training.reporting import Reporting, StepReport
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.events import EventWriter
from raycloak.metrics.traces import OFF, Traces
from raycloak.workers.device.words import CpuWords
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.inputs.units import Units
from raycloak.workers.messages import Admission, StepReply, StepRequest, WorkerSetup
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import ModelSource, build_model
from raycloak.workers.terms.binding import Binding, sum_digests, vectors_digest
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.model_digest import with_state
from raycloak.workers.terms.receipt import Receipt, data_root
from raycloak.workers.train_worker import TrainWorker
from raycloak.workers.vectors.payload import Header, VectorRange
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from raycloak.workers.workload import Workload
from tests.drawn import spare_of
from tests.models import small_model, wide_model
from tests.simulators.tdx import VariantVendor

NOW = 1_800_000_000
SECRET = "ab" * 32
VIRTUAL_WORKERS = 8
DATA_ROOT = b"r" * 32
"""The data root of vectors that are computed outside of any run."""
FEW_FAILURES = ["failure.max_failures=4"]
"""Overrides of a run that refuses every worker: it is over after so many instead of a hundred."""
RENYI = {"accountant": "rdp", "noise_multiplier": 2.0, "epsilon_cap": 20.0}
"""Privacy of a run that is about something else: planned at once, and its ledger imports one accountant of two."""
Arrays = tuple[np.ndarray, np.ndarray]


def examples(count: int = 40) -> Arrays:
    """Return features and labels that never change."""
    generator = np.random.default_rng(1)
    return generator.normal(size=(count, 6)).astype(np.float32), generator.integers(0, 3, count)


def config(overrides: Sequence[str] = (), **fields: Any) -> RunConfig:
    """Return the small run's configuration, changed by whole fields and then by ``dotted.key=value``."""
    raw = {
        "num_workers": 3,
        "virtual_workers": VIRTUAL_WORKERS,
        "steps": 3,
        "expected_batch_size": 20,
        "micro_batch_size": 4,
        "model": "tests.models:small_model",
        "dataset": {"kind": "npz", "path": "examples.npz", "features": "features"},
        "optimizer": {"learning_rate": 0.5, "momentum": 0.9},
        "dp_config": {"noise_multiplier": 2.0, "epsilon_cap": 20.0},
    }
    return parse_config({**raw, **fields}, list(overrides))


def secret_file(home: Path, secret: str = SECRET) -> Path:
    """Return a run secret at rest."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"{secret[:8]}.secret"
    path.write_text(secret)
    return path


def worker_setup(settings: RunConfig, home: Path, data: Arrays | None = None) -> WorkerSetup:
    """Return the setup of the workers; the examples are written to ``home/data``."""
    base = home / "data"
    base.mkdir(parents=True, exist_ok=True)
    features, labels = examples() if data is None else data
    np.savez(base / "examples.npz", features=features, labels=labels)
    assert settings.dataset is not None
    return WorkerSetup(
        model=model_source(settings.model),
        loss=loss_spec(settings.loss),
        dataset=descriptor(settings.dataset),
        base=str(base),
        seed=settings.seed,
        device="cpu",
        allow_nondeterministic=settings.allow_nondeterministic,
        evaluation=split_of_workers(settings, ()),
        micro_batch_bytes=micro_batch_bytes(settings),
        threads=settings.threads_per_worker,
        mode=compute_mode(settings),
    )


def open_workload(setup: WorkerSetup) -> Workload:
    """Return the workload of a worker that may measure on any split."""
    return Workload(setup, lambda split: None)


def orchestrator_key(secret: str = SECRET) -> IdentityKey:
    """Derive the orchestrator's signing key from the run secret."""
    return IdentityKey.from_seed(derive(Secret(bytes.fromhex(secret)), Purpose.ORCHESTRATOR_IDENTITY))


def keys_of(key_context: bytes, v: int, epoch: int = 0, secret: str = SECRET) -> VirtualWorkerKeys:
    """Derive a virtual worker's keys from the run secret."""
    own = Secret(bytes.fromhex(secret))
    return RunKeys(own, run_id_of(own)).of(key_context, v, epoch)


class SilentWords(CpuWords):
    """Words without noise: the encoded sum alone is left."""

    def encoded(self, total, mechanism, noise, start=0):
        return super().encoded(total, mechanism, None)


def computer(
    mechanism: Mechanism,
    data: Arrays | None = None,
    model: Callable[[], nn.Module] = small_model,
    words: CpuWords | None = None,
    units: Units | None = None,
) -> VirtualWorkerComputer:
    """Return a computer of any virtual worker's vectors, outside of any worker."""
    module = build_model(ModelSource.of(f"tests.models:{model.__name__}"), ".", 0)
    dataset = ArrayDataset(*(examples() if data is None else data))
    engine = GradientEngine(module, cross_entropy, mechanism)
    return VirtualWorkerComputer(mechanism, engine, dataset, spare_of(dataset), units, words=words)


def initial_parameters(model: Callable[[], nn.Module] = small_model) -> np.ndarray:
    """Return the start of every run with seed 0, float32."""
    module = build_model(ModelSource.of(f"tests.models:{model.__name__}"), ".", 0)
    return torch.cat([tensor.detach().reshape(-1) for tensor in module.parameters()]).numpy().copy()


def _model(settings: RunConfig) -> Callable[[], nn.Module]:
    return wide_model if settings.model == "tests.models:wide_model" else small_model


@cache
def _planned(dimension: int) -> Mechanism:
    return plan_mechanism(config(), 40, dimension)


def mechanism(dimension: int = 83, **changes: Any) -> Mechanism:
    """Return the small run's mechanism."""
    return _planned(dimension).model_copy(update=changes)


def correlation(masked: np.ndarray, clear: np.ndarray) -> float:
    """Return the correlation of two ring vectors as centred integers, in standard errors of independent ones."""
    signed = np.dtype(f"<i{masked.itemsize}")
    pair = np.corrcoef(masked.view(signed).astype(float), clear.view(signed).astype(float))
    return float(abs(pair[0, 1]) * np.sqrt(len(masked)))


@dataclass
class Clock:
    """A time that only the test moves."""

    now: float = NOW

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class HandRun:
    """The actors of a run, admitted and with keys, driven message by message.

    Receipts are signed by ``ledger_key``, which the test holds; the orchestrator's key is ``orchestrator_key()``.
    """

    def __init__(
        self, home: Path, workers: int = 3, aggregators: int = 1, data: Arrays | None = None, **fields: Any
    ) -> None:
        self.config, self.data = config(num_workers=workers, aggregators=aggregators, **fields), data
        self.home, self.clock, self.ledger_key = home, Clock(), IdentityKey.generate()
        self.vendor = VariantVendor.create()
        self.source = LocalPlatform(self.vendor.platform())
        self.policy, self.collateral = self.judged_by()
        self.orchestrator = self.start_orchestrator()
        self.setup = worker_setup(self.config, home, data).model_copy(update={"code": self.policy.code})
        self.workers = {f"worker-{i}": self.new_worker(f"worker-{i}") for i in range(workers)}
        self.facts, *_ = [worker.prepare(self.setup) for worker in self.workers.values()]
        self.start = self.workers["worker-0"].initial_parameters()
        dimension = sum(tensor.size for tensor in self.facts.tensors)
        plan = make_plan(self.config, self.facts.num_examples, dimension)
        self.mechanism, self.measurements = plan.mechanism, plan.measurements
        planned = (self.mechanism, *self.measurements)
        self.known_answer, *_ = [worker.compute_known_answer(*planned) for worker in self.workers.values()]
        self.manifest = self._manifest()
        split = sealed_terms(self.config, home, "evaluation")
        self.orchestrator.begin(run_terms(self.manifest, self.policy, self.collateral, None, split), "first")
        own = self.orchestrator.present()
        self.admission = Admission(
            manifest=self.manifest,
            policy=self.policy,
            collateral=self.collateral,
            secure_aggregation=self.config.secure_aggregation,
            orchestrator=own,
        )
        self.ranges = split_ranges(self.facts.tensors, aggregators)
        self.aggregators = [MaskedAggregator(f"aggregator-{i}", self.source) for i in range(aggregators)]
        self.presentations: dict[str, Envelope] = {}
        self.opened: dict[int, bytes] = {}
        for name in self.workers:
            self.admit(name)
        for index in range(aggregators):
            self.admit_aggregator(index)
        self.hosting = {name: tuple(range(i, VIRTUAL_WORKERS, workers)) for i, name in enumerate(self.workers)}
        self.place(self.hosting)
        self.parameters = tuple(self.start[owned.start : owned.stop].copy() for owned in self.ranges)
        self.states = tuple(aggregator.initial_state() for aggregator in self.aggregators)
        self.tensors = with_state(self.start, {}, self.facts.tensors)
        self.digest = self.manifest.computation.initial_parameters
        self.input_before = b""

    def judged_by(self) -> tuple[Policy, CollateralBundle]:
        """Return the policy and collateral that evidence is judged by."""
        return simulated_policy(self.vendor, code_measurement()), self.vendor.collateral(NOW)

    def new_worker(self, name: str) -> TrainWorker:
        """Start a worker; all of them share a platform."""
        return TrainWorker(name, self.source, self.clock)

    def start_orchestrator(self) -> EvidenceOrchestrator:
        """Start a new orchestrator on the same state, as after a crash."""
        orchestrator = EvidenceOrchestrator(str(self.home / "orchestrator"), self.clock, source=self.source)
        self.run_id, self.orchestrator_key = orchestrator.open_run(str(secret_file(self.home)))
        return orchestrator

    def _manifest(self) -> Manifest:
        setup = self.setup
        computation = build_computation(
            self.config, setup.model.name, setup.dataset, self.facts, self.mechanism, self.measurements
        )
        unkeyed = build_manifest(
            computation,
            run_id=self.run_id,
            account="by-hand",
            dataset_fingerprint=self.facts.data.fingerprint,
            known_answer=self.known_answer,
            policy_digest=self.policy.digest(),
            ledger_key=self.ledger_key.public,
            orchestrator_key=self.orchestrator_key,
            keys_per_machine=keys_per_machine(self.config, VIRTUAL_WORKERS),
            code=self.facts.code,
        )
        commitments = self.orchestrator.key_commitments(unkeyed.key_context, VIRTUAL_WORKERS, epochs(self.config))
        return unkeyed.with_keys(commitments)

    def admit(self, name: str) -> None:
        """Challenge one worker, and admit it on its presentation."""
        challenge = self.orchestrator.challenge(name, "worker")
        self.presentations[name] = self.workers[name].present(challenge, self.admission)
        self.orchestrator.admit(self.presentations[name])

    def admit_aggregator(self, index: int) -> None:
        """Admit the aggregator of one range likewise."""
        name = f"aggregator-{index}"
        challenge = self.orchestrator.challenge(name, "aggregator")
        self.presentations[name] = self.aggregators[index].present(challenge, self.manifest, self.ranges[index])
        self.orchestrator.admit(self.presentations[name])

    def place(self, hosting: Mapping[str, tuple[int, ...]], epoch: int = 0) -> None:
        """Release keys and record the data they belong to."""
        for name, hosted in hosting.items():
            package = self.orchestrator.release(name, epoch, hosted, self.workers[name]._stage._watch.length)
            opened = self.workers[name].accept_keys(package)
            self.orchestrator.record_data(opened)
            body = parse(DataCommitments, opened.body)
            self.opened.update(zip(body.virtual_workers, body.commitments, strict=True))

    @property
    def commitments(self) -> tuple[bytes, ...]:
        """The commitments to all slices, by virtual worker."""
        return tuple(self.opened[v] for v in sorted(self.opened))

    def computation_keys(self, v: int, epoch: int = 0) -> VirtualWorkerKeys:
        """Return keys of a virtual worker of this run."""
        return keys_of(self.manifest.key_context, v, epoch)

    def clear_vector(self, v: int, step: int = 0) -> np.ndarray:
        """Return virtual worker ``v``'s contribution to ``step`` at the current parameters, before masking."""
        vectors = computer(self.mechanism, self.data, _model(self.config))
        root, parameters = data_root(self.commitments), np.concatenate(self.parameters)
        return vectors.vector(v, self.computation_keys(v), step, self.digest, root, parameters).values

    @property
    def vector_ranges(self) -> tuple[VectorRange, ...]:
        return tuple(VectorRange(index=owned.index, offset=owned.start, length=owned.size) for owned in self.ranges)

    def roster(
        self, step: int = 0, hosting: Mapping[str, tuple[int, ...]] | None = None, commit: StepCommit | None = None
    ) -> Envelope:
        """Return the next attempt's roster."""
        names = tuple(f"aggregator-{index}" for index in range(len(self.aggregators)))
        return self.orchestrator.open_step(
            step, self.hosting if hosting is None else hosting, names, (commit,) if commit else ()
        )

    def forged(self, roster: Envelope, members: Iterable[Member] | None = None, **changes: Any) -> Envelope:
        """Return ``roster`` with changes, signed by the orchestrator's own key."""
        body = Roster.model_validate_json(roster.body)
        if members is not None:
            changes["members"] = tuple(members)
        return seal(body.model_copy(update=changes), orchestrator_key())

    def receipt(self, step: int = 0, **changes: Any) -> Envelope:
        """Return a receipt for the current parameters, but for ``changes``."""
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "query": "gradient",
            "step": step,
            "input_digest": self.digest,
            "manifest_digest": self.manifest.digest(),
            "account": self.manifest.account,
            "mechanism_digest": self.mechanism.digest(),
            "fencing": 1,
            "sequence": 3 + step,
            "head": bytes(32),
            "charged_epsilon": 1.0,
            "data_root": data_root(self.commitments),
            "lineage": self.manifest.lineage,
        }
        return seal(Receipt(**fields | changes), self.ledger_key)

    def request(self, roster: Envelope, step: int = 0, **changes: Any) -> "Asked":
        """Return what the coordinator asks a worker, but for ``changes``."""
        shown = tuple(self.presentations.values())
        honest = Asked(
            self.receipt(step), roster, shown, self.commitments, self.vector_ranges, input_before=self.input_before
        )
        return replace(honest, **changes)

    def ask(
        self, name: str, asked: "Asked", parameters: Sequence[np.ndarray] | None = None
    ) -> tuple[StepReply, tuple[np.ndarray, ...]]:
        """Return a worker's answer: reply, and one vector per range."""
        request = StepRequest(
            roster=asked.roster,
            presentations=asked.presentations,
            commitments=asked.commitments,
            ranges=asked.ranges,
            past=asked.past,
            input_before=asked.input_before,
        )
        given = self.parameters if parameters is None else parameters
        reply, *vectors = self.workers[name].step(asked.receipt, request, *given)
        return reply, tuple(vectors)

    def code(self, name: str, request: "Asked", parameters: Sequence[np.ndarray] | None = None) -> str:
        """Return the code of a worker's answer, which comes with nothing else unless it is ``ok``."""
        reply, vectors = self.ask(name, request, parameters)
        assert (reply.code == "ok") == (reply.header is not None) == all(len(vector) for vector in vectors)
        return reply.code

    def compute(self, roster: Envelope, step: int = 0) -> tuple[ReduceRequest, list[tuple[np.ndarray, ...]]]:
        """Return everybody's answers to ``roster``: the aggregators' request, and per range the vectors."""
        request = self.request(roster, step)
        names = [member.member_id for member in Roster.model_validate_json(roster.body).workers]
        answers = [self.ask(name, request) for name in names]
        assert [reply.code for reply, _ in answers] == ["ok"] * len(names)
        headers = tuple(reply.header for reply, _ in answers if reply.header is not None)
        vectors = list(zip(*(vectors for _, vectors in answers), strict=True))
        return ReduceRequest(
            roster=roster,
            headers=headers,
            input_digest=self.digest,
            ranges=self.vector_ranges,
            before=self.tensors,
            input_before=self.input_before,
        ), vectors

    def binding(self, request: ReduceRequest, **changes: Any) -> Envelope:
        """Return a binding of the step to the vectors whose headers are in ``request``, but for ``changes``."""
        headers, roster = [], Roster.model_validate_json(request.roster.body)
        for envelope in request.headers:
            # A header that no aggregator can read has no tags.
            with suppress(ProtocolError):
                header = parse(Header, envelope.body)
                headers += [header] * (len(header.virtual_workers) == len(header.vector_tags))
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "query": roster.query,
            "step": roster.step,
            "manifest_digest": self.manifest.digest(),
            "vectors_digest": vectors_digest(headers),
            "sums": sum_digests(headers),
            "fencing": 1,
            "sequence": 4 + roster.step,
            "head": bytes(32),
        }
        return seal(Binding(**fields | changes), self.ledger_key)

    def reduce(
        self,
        request: ReduceRequest,
        vectors: Sequence[Sequence[np.ndarray]],
        index: int = 0,
        binding: Envelope | None = None,
    ) -> tuple[ReduceReport, np.ndarray, Mapping[str, np.ndarray]]:
        """Return the answer of the aggregator of range ``index``, to the honest binding unless another is given."""
        bound = self.binding(request) if binding is None else binding
        own = self.parameters[index], self.states[index]
        return self.aggregators[index].reduce(request, bound, *own, *vectors[index])

    def advance(self, roster: Envelope, step: int = 0) -> StepCommit:
        """Take everybody through one attempt that succeeds."""
        return self.finish(roster, self.compute(roster, step), step)

    def finish(
        self, roster: Envelope, computed: tuple[ReduceRequest, list[tuple[np.ndarray, ...]]], step: int = 0
    ) -> StepCommit:
        """Have every range reduced, take the model on, and return the commit."""
        request, vectors = computed
        answers = [self.reduce(request, vectors, owned.index) for owned in self.ranges]
        self.parameters = tuple(parameters for _, parameters, _ in answers)
        self.states = tuple(state for _, _, state in answers)
        ranges = tuple(report.release for report, _, _ in answers if report.release is not None)
        self.tensors = tuple(tensor for part in ranges for tensor in part.tensors)
        point = ModelPoint.of(self.tensors)
        self.digest = point.parameters
        return StepCommit(
            step=step,
            released_digest=self.digest,
            attempts=1,
            ledger_sequence=3 + step,
            ledger_hash=bytes(32),
            state_digest=point.state,
            released=SignedStep(roster=roster, ranges=ranges),
        )


def with_another_tensor(report: ReduceReport) -> ReduceReport:
    """Return a report whose first tensor has other values than the aggregator signed."""
    assert report.release is not None
    first, *rest = report.release.tensors
    tensors = (first.model_copy(update={"content": bytes(32)}), *rest)
    return report.model_copy(update={"release": report.release.model_copy(update={"tensors": tensors})})


@dataclass(frozen=True)
class Asked:
    """The arguments of one question to a worker."""

    receipt: Envelope
    roster: Envelope
    presentations: tuple[Envelope, ...]
    commitments: tuple[bytes, ...]
    ranges: tuple[VectorRange, ...]
    past: int = 0
    input_before: bytes = b""


@dataclass(frozen=True)
class Call:
    """A call that the coordinator makes; ``index`` counts the member's earlier calls of the method."""

    member_id: str
    method: str
    index: int
    arguments: tuple[Any, ...]


Fate = str | Callable[..., tuple[Any, ...]] | None
"""``dies`` (before it answers), ``dies after`` (having done it), ``hangs``, ``lacks`` (an object that it was given),
``garbles`` (its answer), or a function of the values returned."""


class Stage(LocalBackend):
    """A backend on which the test decides what becomes of each call; it keeps every call and its outcome.

    With ``arrival``, workers asked for a step answer only when they are waited for, in the order it gives.

    Attributes:
        time: passes while the coordinator waits in vain, and when the test moves it.
        vacancies: how many more workers there is room for; replacements need none.
        drained: members whose node is being drained.
    """

    def __init__(self, inner: LocalBackend, tamper: Callable[[TrainWorker, str], None] | None = None) -> None:
        def make_worker(member_id: str) -> TrainWorker:
            worker: TrainWorker = inner._make_worker(member_id)
            if tamper is not None:
                tamper(worker, member_id)
            return worker

        super().__init__(make_worker, inner._make_aggregator)
        self.disturb: Callable[[Call], Fate] = lambda call: None
        self.arrival: Callable[[list[Any]], Iterable[Any]] | None = None
        self.log: list[tuple[Call, tuple[Any, ...]]] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._hanging: list[Any] = []
        self.time = Clock(0.0)
        self.vacancies = 0
        self.drained: set[str] = set()
        self._underway: list[tuple[tuple[Any, ...], Callable[[], tuple[Any, ...]]]] = []

    def call(self, actor: Actor, method: Callable[..., Any], *args: Any, returns: int = 1) -> tuple[Any, ...]:
        if (failure := self._failure_of(args)) is not None:
            return self._failed(returns, failure)
        place = actor.member_id, method.__name__
        values = tuple(getattr(arg, "value", arg) for arg in args)
        call = Call(*place, self._counts[place], values)
        self._counts[place] += 1
        fate = self.disturb(call)
        if method is Worker.step and self.arrival is not None:
            references = tuple(Settled() for _ in range(returns))
            self._underway.append((references, lambda: self._play(fate, actor, method, args, returns)))
        else:
            references = self._play(fate, actor, method, args, returns)
        self.log.append((call, references))
        return references

    def _failure_of(self, given: Iterable[Any]) -> Exception | None:
        """Return why a call with these arguments reaches nobody: an awaited answer failed, or its actor is ended."""
        for each in given:
            if any(each is owed for owed in self._hanging):
                return ActorLost("died")
            if getattr(each, "error", None) is not None:
                error: Exception = each.error
                return error
        return None

    def _failed(self, returns: int, error: Exception) -> tuple[Any, ...]:
        references = tuple(Settled() for _ in range(returns))
        for each in references:
            each.error = error
        return references

    def _play(
        self, fate: Fate, actor: Actor, method: Callable[..., Any], args: tuple[Any, ...], returns: int
    ) -> tuple[Any, ...]:
        if fate == "hangs":
            references = tuple(Settled() for _ in range(returns))
            self._hanging += references
            return references
        if fate == "lacks":
            return self._failed(returns, ActorLost("object_lost"))
        if fate == "garbles":
            return self._failed(returns, ProtocolError("malformed", "no answer of this method"))
        if fate == "dies":
            self.stop(actor)
        references = super().call(actor, method, *args, returns=returns)
        if fate == "dies after":
            self.stop(actor)
            references = super().call(actor, method, *args, returns=returns)
        if callable(fate):
            references = tuple(Settled(value) for value in fate(*(each.value for each in references)))
        return references

    def wait(self, references: Sequence[Any], deadline_s: float) -> Sequence[Any]:
        underway, self._underway = self._underway, []
        for waiting, answer in self.arrival(underway) if self.arrival is not None else ():
            for reference, settled in zip(waiting, answer(), strict=True):
                reference.value, reference.error = settled.value, settled.error
        ready = [each for each in references if each not in self._hanging]
        if len(ready) < len(references):
            self.time.sleep(deadline_s)
        return ready

    def room(self) -> int:
        return self.vacancies

    def departing(self) -> set[str]:
        return self.drained

    def fetch(self, reference: Any, deadline_s: float) -> Any:
        if reference in self._hanging:
            raise ActorLost("deadline")
        return super().fetch(reference, deadline_s)

    def calls(self, method: str) -> list[Call]:
        """Return all calls of ``method``, in order."""
        return [call for call, _ in self.log if call.method == method]

    @property
    def stopped(self) -> set[str]:
        """Return the actors that were stopped, or died."""
        return set(self._stopped)

    @property
    def rosters(self) -> list[Roster]:
        """All rosters that were issued, in order."""
        answers = [references[0].value for call, references in self.log if call.method == "open_step"]
        return [Roster.model_validate_json(envelope.body) for envelope in answers if envelope is not None]


def on(method: str, member_id: str, fate: Fate, index: int = 0) -> Callable[[Call], Fate]:
    """Return the fate of one call; every other is left alone."""
    return lambda call: fate if (call.method, call.member_id, call.index) == (method, member_id, index) else None


def on_machines(home: Path, machine_of: Callable[[str], str]) -> Callable[[TrainWorker, str], None]:
    """Return what gives each worker of a run in ``home`` the evidence of a machine; all others share one."""
    settle(home)
    vendor = SimulatedVendor.load_or_create(home / "simulator")

    def move(worker: TrainWorker, member_id: str) -> None:
        worker._attester._source = LocalPlatform(vendor.platform(machine_of(member_id)))

    return move


@dataclass
class WholeRun:
    """A run in one process, from its actors to its evidence log; ``finished`` is there once :meth:`train` returned."""

    home: Path
    config: RunConfig
    session: Session
    stage: Stage
    folder: Path
    coordinator: Coordinator
    events: EventWriter
    metrics: list[RunMetrics] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    restarts: list[tuple[str, str]] = field(default_factory=list)
    finished: Finished | None = None

    def train(self) -> Finished:
        """Run to the end; what ends it early is raised."""
        with ExitStack() as stack:
            stack.enter_context(self.events)
            stack.callback(lambda: [actor.handle.close() for actor in self.session.control.actors.values()])
            self.finished = self.coordinator.run()
        return self.finished

    def change(self, **fields: Any) -> None:
        """Give the coordinator a session with other fields, before it is trained."""
        order = self.coordinator.order
        self.coordinator.order = replace(order, session=replace(order.session, **fields))

    @property
    def digests(self) -> list[str]:
        """Parameter digest after each committed step, as progress told it."""
        return [report.model_digest for report in self.reports]

    @property
    def entries(self) -> int:
        """Entries of the run's ledger."""
        ledger = PrivacyLedger(f"sqlite:///{self.home / 'ledger.sqlite'}", create=False)
        try:
            return ledger.view().head.sequence
        finally:
            ledger.close()

    @property
    def told(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def evidence(self) -> list[tuple[str, dict[str, Any]]]:
        """Kind and body of each entry of the exported evidence log, after its signature and chain were verified."""
        path = self.folder / "evidence.jsonl"
        read_exported_log(path, self.session.orchestrator_key)
        lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
        return [(line["kind"], line["body"]) for line in lines]

    @property
    def left(self) -> list[tuple[str, str]]:
        """Return the members that left, each with its code."""
        return [(departure.member_id, departure.code) for departure in self.departures]

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one series of the run."""
        samples = [sample for family in self.metrics[0].collect() for sample in family.samples if sample.name == name]
        return sum(each.value for each in samples if labels.items() <= each.labels.items())


@cache
def _site() -> Path:
    """Return a home with an empty ledger and a simulated vendor alone, the same for the whole session of tests."""
    folder = tempfile.TemporaryDirectory(prefix="raycloak-site-")
    atexit.register(folder.cleanup)
    site = Path(folder.name)
    PrivacyLedger(f"sqlite:///{site / 'ledger.sqlite'}").close()
    SimulatedVendor.load_or_create(site / "simulator")
    return site


def settle(home: Path) -> None:
    """Give a new ``home`` the ledger's key and the vendor that all homes of these tests share.

    Keys depend on both, so runs of two homes give the same bytes only if the homes agree on them.
    """
    for name, copy in (("simulator", shutil.copytree), ("ledger.sqlite", shutil.copy2)):
        if not (home / name).exists():
            home.mkdir(parents=True, exist_ok=True)
            copy(_site() / name, home / name)


def whole_run(
    home: Path,
    *,
    disturb: Callable[[Call], Fate] | None = None,
    tamper: Callable[[TrainWorker, str], None] | None = None,
    data: Arrays | None = None,
    secret: str | None = SECRET,
    overrides: Sequence[str] = (),
    clock: Callable[[], float] | None = None,
    assignment: Assignment | None = None,
    traces: Traces = OFF,
    pace: Pace = OPEN,
    folder: Path | None = None,
    listed: tuple[bytes, ...] | None = None,
    **fields: Any,
) -> WholeRun:
    """Return a run that is ready to be trained; with one ``home`` and ``secret``, a repeat of the same run.

    A slice of its data is one micro-batch, not two, which takes a fifth of its time less.

    Args:
        disturb: what becomes of each call of the coordinator.
        tamper: changes a worker right after it was started.
        secret: None lets the orchestrator generate one.
        clock: of orchestrator and workers; a `Clock` is the time of the stage, too.
        assignment: what the execution is to do; the whole of a new run by default.
        traces: where its spans go.
        pace: when steps may be charged and released, and what a client sent for them.
        folder: the directory of an earlier execution of the run; a new one by default.
        listed: the policy's list of code, which is then looked up in ``home/data``.
    """
    settings = config(overrides, **{"micro_batch_size": 5, **fields})
    path = secret_file(home, secret) if secret else None
    settle(home)
    session, backend = local_session(
        home, path, *([clock] if clock else []), witness=settings.ledger.witness, bind=settings.attestation.bind
    )
    stage = Stage(backend, tamper)
    if isinstance(clock, Clock):
        stage.time = clock
    if disturb is not None:
        stage.disturb = disturb
    control = replace(session.control, backend=stage, max_restarts=settings.failure.max_failures)
    policy = session.policy.model_copy(update={"code": listed})
    session = replace(session, backend=stage, control=control, policy=policy)
    folder = folder or Path(tempfile.mkdtemp(dir=home))
    record = RunRecord(
        run_id=session.run_id,
        name="run",
        base=str(home),
        secret_file=str(path),
        started_at=float(NOW),
        status="running",
        driver_base=str(home),
    )
    events = EventWriter(folder / "metrics.jsonl")
    reporting = Reporting(
        metrics=lambda manifest, evidence: _metrics(run, manifest, evidence),
        events=events,
        progress=lambda report: run.reports.append(report),
        departure=lambda departure: run.departures.append(departure),
        joined=lambda member_id: run.joined.append(member_id),
        restart=lambda restart: run.restarts.append((restart.role, restart.cause)),
        traces=traces,
    )
    setup = worker_setup(settings, home, data).model_copy(update={"code": policy.code})
    order = Order(
        settings,
        session,
        setup,
        partial(public_evaluation, settings, setup.model, setup.base),
        reporting,
        RunFolder(folder, record),
        assignment or NewRun(),
        pace=pace,
        code=listed_code(policy, settings, [], setup.base),
    )
    coordinator = Coordinator(order, Timer(now=stage.time, sleep=stage.time.sleep))
    run = WholeRun(home, settings, session, stage, folder, coordinator, events)
    return run


def trained(home: Path, **arguments: Any) -> WholeRun:
    """:func:`whole_run`, trained to its end."""
    run = whole_run(home, **arguments)
    run.train()
    return run


def _metrics(run: WholeRun, manifest: Manifest, evidence_class: str) -> RunMetrics:
    run.metrics.append(RunMetrics(run_facts(manifest, evidence_class, run.config)))
    return run.metrics[0]
