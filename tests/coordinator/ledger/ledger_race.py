"""Child process of `test_race.py`: processes that race for the last step of an account, round after round.

It never imports torch, so that forking it is safe and fast.
"""

import json
import multiprocessing
import sys
from typing import Any

import sqlalchemy as sa

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.metrics.errors import BudgetError
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, MANIFEST, PARAMETERS, expected_epsilon, mechanism

RACERS = 8
PEOPLE = DataMarks(fingerprint=b"f" * 32)
NOISE = 60.0
DEADLINE_S = 600.0
FORKING = multiprocessing.get_context("fork")


class Line:
    """The line at which racers wait for each other: one semaphore each, since a barrier asks every process six times as
    often."""

    def __init__(self) -> None:
        self._go = [FORKING.Semaphore(0) for _ in range(RACERS)]
        self._done = FORKING.Semaphore(0)
        self._broken = FORKING.RawValue("b", 0)

    def wait(self, number: int) -> None:
        """Wait for this racer's next round."""
        assert self._go[number].acquire(timeout=DEADLINE_S), "the next round did not begin"

    def arrive(self, *, broken: bool = False) -> None:
        """End this racer's round, or the race if something is ``broken``."""
        self._broken.value |= broken
        self._done.release()

    def round(self) -> None:
        """Let all racers go at once, and wait for all of them."""
        for each in self._go:
            each.release()
        for _ in self._go:
            assert self._done.acquire(timeout=DEADLINE_S), "the round did not end"
        assert not self._broken.value, "a racer failed; its errors are above"


def main(url: str, rounds: int) -> None:
    """Race, and print who won each round, and which steps the ledger then says are charged to the run of each."""
    won = FORKING.RawArray("b", RACERS * rounds)
    line = Line()
    # Loads the database's driver, without a connection, before there are nine processes that would do so.
    sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:")).dispose()
    racers = [FORKING.Process(target=race, args=(url, rounds, number, won, line)) for number in range(RACERS)]
    for racer in racers:
        racer.start()
    ledger = PrivacyLedger(url)
    # The first run fixes the order that `expected_epsilon` counts on, which is that of CAP.
    for account, epsilon in (("patients", CAP), ("reserve", 100.0)):
        ledger.open_account(account, OpeningTerms(epsilon, DELTA), data=PEOPLE, also=account == "reserve")
    line.round()
    ledger.change_cap("patients", cap(0))
    for step in range(rounds):
        if step:
            ledger.transfer("reserve", "patients", cap(step) - cap(step - 1))
        line.round()
    for racer in racers:
        racer.join(DEADLINE_S)
    audited = ledger.verify()
    result: dict[str, Any] = {
        "codes": [racer.exitcode for racer in racers],
        "winners": [[number for number in range(RACERS) if won[number * rounds + step]] for step in range(rounds)],
        "charged": [sorted(audited.runs[f"run-{number}"].charges["gradient"]) for number in range(RACERS)],
    }
    print(json.dumps(result))


def race(url: str, rounds: int, number: int, won: Any, line: Line) -> None:
    """Try to charge one step in each round, as one coordinator with a run of its own."""
    run_id = f"run-{number}"
    try:
        line.wait(number)
        ledger = PrivacyLedger(url)
        changes = {"steps": rounds, "dimension": 10, "noise_multiplier": NOISE, "sigma": NOISE * 371_000}
        ledger.register_run(RegistrationTerms(run_id, "patients", (mechanism(**changes),), MANIFEST, PEOPLE))
        ledger.bind_data(run_id, MANIFEST, DATA)
        line.arrive()
        for step in range(rounds):
            line.wait(number)
            try:
                ledger.charge(run_id, step, PARAMETERS, MANIFEST)
                won[number * rounds + step] = 1
            except BudgetError as refusal:
                if refusal.code != "cap_exceeded":
                    raise
            line.arrive()
    except BaseException:
        line.arrive(broken=True)
        raise


def cap(step: int) -> float:
    """Return the cap that admits charges until ``step + 1`` of them are made, and no more."""
    return expected_epsilon(step + 1, NOISE) * (1 + 1e-9)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
