"""Child process of `test_ledger_race.py`: processes that race for the last step of an account, round after round.

It never imports torch, so that forking it is safe and fast.
"""

import json
import multiprocessing
import sys
from multiprocessing.synchronize import Barrier
from typing import Any

from coordinator.ledger import PrivacyLedger
from metrics.errors import BudgetError
from tests.coordinator.ledger_cases import DELTA, MANIFEST, PARAMETERS, expected_epsilon, mechanism

RACERS = 8
FINGERPRINT = b"f" * 32
NOISE = 60.0
DEADLINE_S = 120.0


def main(url: str, rounds: int) -> None:
    """Race, and print who won each round, and which steps the ledger then says are charged to the run of each."""
    forking = multiprocessing.get_context("fork")
    won = forking.RawArray("b", RACERS * rounds)
    barrier = forking.Barrier(RACERS + 1)
    racers = [forking.Process(target=race, args=(url, rounds, number, won, barrier)) for number in range(RACERS)]
    for racer in racers:
        racer.start()
    ledger = PrivacyLedger(url)
    for account, epsilon in (("patients", cap(0)), ("reserve", 100.0)):
        ledger.open_account(account, epsilon, DELTA, fingerprint=FINGERPRINT)
    barrier.wait(DEADLINE_S)
    barrier.wait(DEADLINE_S)
    for step in range(rounds):
        if step:
            ledger.transfer("reserve", "patients", cap(step) - cap(step - 1))
        barrier.wait(DEADLINE_S)
        barrier.wait(DEADLINE_S)
    for racer in racers:
        racer.join(DEADLINE_S)
    replay = ledger.verify()
    result: dict[str, Any] = {
        "codes": [racer.exitcode for racer in racers],
        "winners": [[number for number in range(RACERS) if won[number * rounds + step]] for step in range(rounds)],
        "charged": [sorted(replay.runs[f"run-{number}"].charges["gradient"]) for number in range(RACERS)],
    }
    print(json.dumps(result))


def race(url: str, rounds: int, number: int, won: Any, barrier: Barrier) -> None:
    """One coordinator with a run of its own: try to charge one step in each round."""
    run_id = f"run-{number}"
    barrier.wait(DEADLINE_S)
    ledger = PrivacyLedger(url)
    changes = {"steps": rounds, "dimension": 10, "noise_multiplier": NOISE, "sigma": NOISE * 371_000}
    ledger.register_run(run_id, "patients", (mechanism(**changes),), MANIFEST, FINGERPRINT)
    barrier.wait(DEADLINE_S)
    for step in range(rounds):
        barrier.wait(DEADLINE_S)
        try:
            ledger.charge(run_id, step, PARAMETERS, MANIFEST)
            won[number * rounds + step] = 1
        except BudgetError as refusal:
            if refusal.code != "cap_exceeded":
                barrier.abort()
                raise
        barrier.wait(DEADLINE_S)


def cap(step: int) -> float:
    """The cap that admits charges until ``step + 1`` of them are made, and no more."""
    return expected_epsilon(step + 1, NOISE) * (1 + 1e-9)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
