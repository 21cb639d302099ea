"""The work of a proof grows with the record and no faster; counted in operations of the interpreter, never in time."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from raycloak.attestation.log.entries import Entry
from raycloak.coordinator.proof import output_claims
from raycloak.coordinator.proof.bundle import PACKAGE, PACKAGE_FILES
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.history import History, LoggedPackage
from tests.coordinator.proof.proof_cases import Proved, established_case, parts_of

FEW, MANY = 50, 400


def operations(work: Callable[[], object]) -> int:
    """Return how many operations the interpreter executes for ``work``."""
    count = 0

    def each(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return each

    former = sys.gettrace()
    sys.settrace(each)
    try:
        work()
    finally:
        sys.settrace(former)
    return count


def require_linear(work: Callable[[int], Callable[[], object]]) -> None:
    few, many = operations(work(FEW)), operations(work(MANY))
    assert many < 1.2 * (MANY / FEW) * few, f"{FEW} cost {few}, {MANY} cost {many}"


def test_the_count_tells_a_square_from_a_line() -> None:
    require_linear(lambda n: lambda: sum(i for i in range(n)))
    with pytest.raises(AssertionError, match="cost"):
        require_linear(lambda n: lambda: sum(i for _ in range(n) for i in range(n)))


def _entries(n: int) -> list[Entry]:
    """Return n steps, each committed, sealed, published, and loaded again after it was made."""
    entries = []
    for step in range(n):
        digest = step.to_bytes(32).hex()
        package = f'"package_digest":"{digest}","step":{step + 1}'
        bodies = {
            "committed": f'{{"attempts":1,"ledger_hash":"{digest}","ledger_sequence":{step + 1},"query":"gradient",'
            f'"released_digest":"{digest}","releases":[],"state_digest":"","step":{step}}}',
            "sealed": f"{{{package}}}",
            "published": f"{{{package}}}",
            "loaded": f'{{"after_step":{step + 1},"model_digest":"{digest}",{package}}}',
        }
        entries += [Entry(len(entries), kind, body.encode(), b"") for kind, body in bodies.items()]
    return entries


def test_a_log_with_more_packages_and_loads_costs_in_proportion(record: Proved) -> None:
    manifest = record.manifest

    def work(n: int) -> Callable[[], object]:
        history = History(manifest, manifest.digest(), record.trust.policy, {}, sessions=1)
        for step in range(n):
            history.rosters["gradient", step].append(b"")
        entries = _entries(n)

        def follow() -> None:
            for entry in entries:
                history.follow(entry)
            assert history.problems == {}
            assert all(history.loaded_after.get(step) for step in range(1, n + 1))

        return follow

    require_linear(work)


def test_more_packages_in_a_record_cost_in_proportion(record: Proved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the real package, n are made that differ in their step; what is looked up of each is there."""

    def work(n: int) -> Callable[[], object]:
        case, previous = established_case(record), b""
        real = next(iter(case.packages.values()))
        commit, made = case.history.commits["gradient", real.step - 1], {}
        for step in range(1, n + 1):
            package = real.model_copy(update={"step": step, "previous": previous})
            made[str(step).encode()] = package
            previous = package.digest()
            case.history.commits["gradient", step - 1] = commit
            case.history.rosters["gradient", step - 1] = [real.roster_digest]
            logged = LoggedPackage(step=step, package_digest=previous)
            case.history.sealed.add(logged)
            case.history.published[previous] = logged
        names = {f"{PACKAGE}step-{step:06d}.tssp": str(step).encode() for step in range(1, n + 1)}
        case.parts = parts_of({f"{name}/{file}": names[name] for name in names for file in PACKAGE_FILES})

        def claim() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(output_claims, "open_manifest", lambda body, *_: ("site", made[body]))
                assert output_claims.packages(case).startswith(f"{n} packages")

        return claim

    require_linear(work)


def test_more_measurements_and_loads_in_the_metrics_cost_in_proportion(record: Proved) -> None:
    def work(n: int) -> Callable[[], object]:
        case = established_case(record)
        place, known = next(iter(case.released.items()))
        charge = case.run.charges[place[0]][place[1]]
        case.released = {(place[0], number): known for number in range(n)}
        event = (
            f'{{"event":"measurement","query":"{place[0]}","release":{place[1]},"value_name":'
            f'"{next(iter(known.values))}","epsilon":{case.charge(charge).charged_epsilon!r}}}'
        )
        case.parts = parts_of({"metrics.jsonl": (event + "\n").encode() * n})
        return lambda: _not_there(case)

    require_linear(work)


def _not_there(case: ProofCase) -> None:
    with pytest.raises(output_claims.NotThere):
        output_claims.metrics(case)


@pytest.mark.parametrize("stated", ["[1]", "{}", "null", '"evaluation"'])
def test_a_place_in_the_metrics_that_is_none_is_broken(record: Proved, stated: str) -> None:
    """Also a list or an object, which no table can be asked for."""
    for event in ('"measurement","query":{}', '"load","steps":{}'):
        case = established_case(record)
        line = f'{{"event":{event.replace("{}", stated)}}}\n'
        case.parts = parts_of({"metrics.jsonl": line.encode()})
        with pytest.raises(output_claims.Broken, match="it states event"):
            output_claims.metrics(case)
