"""The founders of a run: its first workers, from their start to the facts that most of them state.

A manifest states what the founders agree on. A founder that built another model is refused here, by the name of the
tensor. One that differs otherwise is refused later, when it presents itself for that manifest.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from raycloak.coordinator.cluster.control import START_AGAIN
from raycloak.coordinator.cluster.remote import Parameters
from raycloak.coordinator.membership.crew import Crew, start_crew
from raycloak.coordinator.membership.members import Members
from raycloak.metrics.errors import MORE_MEMORY, ProtocolError, RunFailedError
from raycloak.workers.messages import WorkerFacts, WorkerSetup
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.model_digest import check_same_tensors, model_digest, tensor_digests

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Founders:
    """Workers that have opened their data and built their model, but are not admitted.

    Attributes:
        setup: of every later worker, which has to build the same model.
        facts: of code, data and numerics, as most workers state them.
        start: the initial parameters, float32[d], whose digest is in ``facts``.
    """

    members: Members
    setup: WorkerSetup
    facts: WorkerFacts
    start: Parameters

    @classmethod
    def prepare(cls, members: Members, setup: WorkerSetup, crew: Crew | None, meanwhile: Callable[[], None]) -> Self:
        """Take the crew into ``members``, and have every worker prepared.

        Args:
            crew: processes that were started before; None to start them.
            meanwhile: what to do while workers open their data.

        Raises:
            ConfigError: what a worker found wrong with the data or the model.
            RunFailedError: ``too_few_workers`` if none could be prepared; ``out_of_memory`` if all lacked memory.
        """
        crew = crew or start_crew(members.backend, members.config)
        members.workers.update(crew.workers)
        members.aggregators.extend(crew.aggregators)
        facts = members.ask_workers(lambda worker: worker.prepare(setup), meanwhile)
        if not facts:
            raise _nobody(members, "no worker could be prepared")
        wanted = _most_common(map(_class, facts.values()))
        chosen = next(fact for fact in facts.values() if _class(fact) == wanted)
        for member_id, own in facts.items():
            # Other code or another numerics class may well give other tensors; the manifest names those causes.
            if (own.numerics, own.model_code) == (chosen.numerics, chosen.model_code):
                try:
                    check_same_tensors(chosen.contents, own.contents)
                except ProtocolError as refusal:
                    members.lose(member_id, refusal.code, refusal.message)
        start = _start(members, facts, chosen)
        return cls(members, setup.model_copy(update={"contents": chosen.contents}), chosen, start)

    def known_answer(
        self, mechanism: Mechanism, measurements: tuple[Measurement, ...], meanwhile: Callable[[], None]
    ) -> bytes:
        """Return the known answer that most workers compute; do something else while they do."""
        answers = self.members.ask_workers(
            lambda worker: worker.compute_known_answer(mechanism, *measurements), meanwhile
        )
        if not answers:
            raise _nobody(self.members, "no worker computed the known answer")
        return _most_common(answers.values())


def _class(facts: WorkerFacts) -> Hashable:
    """The facts by which the founders of a run are told apart."""
    return facts.numerics, facts.model_code, facts.tokenizer, facts.contents


def _start(members: Members, facts: Mapping[str, WorkerFacts], chosen: WorkerFacts) -> Parameters:
    """Return the initial parameters, of the first worker that gives those of the chosen digest."""
    found: list[Parameters] = []

    def take(_: str, start: Parameters) -> None:
        if model_digest(chosen.tensors, tensor_digests(start, chosen.tensors)) != chosen.initial_parameters:
            raise ProtocolError("parameters_mismatch", "a worker gave other initial parameters than it had stated")
        found.append(start)

    for member_id, own in facts.items():
        if member_id in members.workers and own.initial_parameters == chosen.initial_parameters:
            members.collect({member_id: members.workers[member_id].initial_parameters()}, take)
            if found:
                return found[0]
    raise _nobody(members, "no worker gave the initial parameters")


def _nobody(members: Members, what: str) -> RunFailedError:
    message = f"{what}: {members.departures.reasons()}."
    if {departure.code for departure in members.departures.all} == {"out_of_memory"}:
        return RunFailedError("out_of_memory", message, MORE_MEMORY)
    return RunFailedError("too_few_workers", message, START_AGAIN)


def _most_common(values: Iterable[T]) -> T:
    """Return the most frequent value; the first seen of several."""
    return Counter(values).most_common(1)[0][0]
