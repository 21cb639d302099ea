"""A run under random signals gives the bytes of the undisturbed one. `RAYCLOAK_CHAOS_KILLS` sets another number."""

import json
import os

from raycloak_lab.bench.chaos.schedule import KILLED_ROLES
from tests.conftest import QUICK_START, ROOT

CONFIG = ROOT / "benchmarks" / "chaos.yaml"
KILLS = int(os.environ.get("RAYCLOAK_CHAOS_KILLS", "5"))
SECONDS_PER_KILL = 180
DEADLINE_S = 10
"""Longer than a busy machine needs for a step. The run waits for so long once for each process that is stopped."""
STEPS_PER_KILL = 1000
"""Some ten times as many as are taken; each execution plans all of them, and far more take it seconds."""


def test_a_run_under_chaos_has_the_bytes_and_the_charges_of_the_undisturbed_one(run_python):
    done = run_python(
        "-m", "raycloak_lab", "bench", "chaos", str(CONFIG), "--kills", str(KILLS), "--seed", "4", "--json",
        "--set", "num_workers=3", "--set", f"steps={STEPS_PER_KILL * KILLS}", "--set", "dp_config.accountant=rdp",
        "--set", f"failure.step_deadline_s={DEADLINE_S}", "--set", f"failure.control_deadline_s={DEADLINE_S}",
        environment={"PYTHONPATH": f"{ROOT}{os.pathsep}{QUICK_START}"}, deadline_s=KILLS * SECONDS_PER_KILL,
    )  # fmt: skip
    assert done.code == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["breaches"] == []
    assert report["kills"] == KILLS == sum(hit["count"] for hit in report["hits"])
    assert {hit["role"] for hit in report["hits"]} == set(KILLED_ROLES)
    assert report["driver_restarts"] >= 1
    assert report["digest_differences"] == report["lost_charges"] == report["double_charges"] == []
    assert report["failed_claims"] == []
    assert report["ledger_chain_valid"]
    assert report["evidence_log_valid"]
