"""The alerts, each in states in which it fires and in states in which it must not, judged by promtool."""

import re
import shutil
import subprocess

import pytest
import yaml

from raycloak.metrics.registry import SERIES
from raycloak_lab.adapter.collector import ADAPTER_SERIES
from raycloak_lab.dashboards.render import RULES, RULES_RESOURCE, rules_resource
from tests.layout import LAB, ROOT
from tests.metrics.samples import sample_names

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian package prometheus) is not installed")
FILES = (RULES, LAB / "adapter" / "adapter.rules.yml")
GROUPS = [group for file in FILES for group in yaml.safe_load(file.read_text())["groups"]]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
RECORDED = {rule["record"]: rule for group in GROUPS for rule in group["rules"] if "record" in rule}
EXPORTED = {
    name: series for series in (*SERIES, *ADAPTER_SERIES) if series.privacy.exportable for name in sample_names(series)
}

R = 'run="r",instance="i"'


def steps(minutes, every=1, planned=200, spent=1.0, before=0.0):
    """Return the series of a run, a sample a minute, that finishes a step ``every`` so many minutes.

    By its planned end it would have spent ``spent`` of its account, of which other runs had spent ``before``.
    """
    done = [min(minute // every, planned) for minute in range(minutes + 1)]
    return {
        f'raycloak_run_info{{{R},account="a",evidence_class="amd_sev_snp+nvidia_gpu"}}': [1] * len(done),
        f'raycloak_run_state{{{R},state="training"}}': [1] * len(done),
        f"raycloak_run_start_timestamp_seconds{{{R}}}": [0] * len(done),
        f"raycloak_last_commit_timestamp_seconds{{{R}}}": [minute // every * every * 60 for minute in range(len(done))],
        f"raycloak_step_duration_seconds_sum{{{R}}}": [each * every * 60 for each in done],
        f"raycloak_step_duration_seconds_count{{{R}}}": done,
        f"raycloak_steps_planned{{{R}}}": [planned] * len(done),
        f"raycloak_steps_finished{{{R}}}": done,
        'raycloak_ledger_up{instance="i"}': [1] * len(done),
        # One step is charged before it is finished.
        'raycloak_privacy_budget_spent_ratio{instance="i",account="a"}': [
            min(before + spent * min(each + 1, planned) / planned, 1) for each in done
        ],
    }


def burst(minutes, until):
    """Return a run whose account somebody else spent from, too, ``until`` a minute."""
    series = steps(minutes, planned=600, spent=0.4)
    key = 'raycloak_privacy_budget_spent_ratio{instance="i",account="a"}'
    series[key] = [each + 0.01 * min(minute, until) for minute, each in enumerate(series[key])]
    return series


def beside(series):
    """Return the series of a run, and of another one of the same account and pace on a page of its own."""
    return series | {key.replace('run="r"', 'run="s"').replace('"i"', '"j"'): values for key, values in series.items()}


def constant(minutes, **values):
    """Return series that have one value, a sample a minute."""
    return {name: [value] * (minutes + 1) for name, value in values.items()}


def workers(admitted, required, planned):
    return constant(
        10,
        **{
            f"raycloak_workers_admitted{{{R}}}": admitted,
            f"raycloak_workers_required{{{R}}}": required,
            f"raycloak_workers_planned{{{R}}}": planned,
        },
    )


def gpu(minutes, state, evidence):
    return constant(
        minutes,
        **{
            f'raycloak_run_info{{{R},account="a",evidence_class="{evidence}"}}': 1,
            **{
                f'raycloak_gpu_confidential_compute_state{{instance="i",node="n",state="{each}"}}': int(each == state)
                for each in ("off", "on", "ppcie", "devtools", "simulated")
            },
        },
    )


def waits(minutes, slow):
    """Return a minute's 100 calls of a service, of which ``slow`` wait for more than 5 s."""
    return {
        f'raycloak_service_wait_seconds_bucket{{instance="i",le="{le}"}}': [n * minute for minute in range(minutes + 1)]
        for le, n in (("0.1", 100 - slow), ("5.0", 100 - slow), ("10.0", 100), ("+Inf", 100))
    }


def operations(minutes, done, failed):
    """Return so many operations of a training service a minute, and one that was submitted at the start and waits."""
    total = 'raycloak_training_service_operations_total{{instance="i",kind="optim_step",outcome="{}"}}'
    return {
        total.format("done"): [done * minute for minute in range(minutes + 1)],
        total.format("failed"): [failed * minute for minute in range(minutes + 1)],
        'raycloak_training_service_oldest_operation_timestamp_seconds{instance="i"}': [0] * (minutes + 1),
    }


def adapter_calls(minutes, **each):
    """Return so many calls of an adapter's server a minute, by code."""
    total = 'raycloak_adapter_calls_total{{instance="i",method="Apply",code="{}"}}'
    return {total.format(code): [n * minute for minute in range(minutes + 1)] for code, n in each.items()}


CASES = {
    # (series, minute of the look, alerts that fire there)
    "a plan that uses its whole cap, at its very end": (steps(199), 198, ()),
    "another run spends as much": (
        steps(60, spent=2.0),
        60,
        ("BudgetBurnsFast", "BudgetBurnsSlowly", "BudgetExhaustedSoon"),
    ),
    "another run has spent for a few minutes": (steps(20, spent=2.0), 8, ("BudgetBurnsFast",)),
    "another run has spent for a quarter of an hour": (
        steps(20, spent=2.0),
        14,
        ("BudgetBurnsFast", "BudgetExhaustedSoon"),
    ),
    "the account was half spent before": (steps(60, spent=0.5, before=0.5), 60, ()),
    "the account was half spent, the plan is for all of it": (
        steps(60, before=0.5),
        60,
        ("BudgetBurnsFast", "BudgetBurnsSlowly", "BudgetExhaustedSoon"),
    ),
    "two runs share an account as planned": (beside(steps(60, spent=1.0)), 60, ()),
    "a burst that goes on": (burst(40, 40), 40, ("BudgetBurnsFast", "BudgetBurnsSlowly", "BudgetExhaustedSoon")),
    # The day still remembers it; nobody is called.
    "a burst that stopped": (burst(60, 30), 60, ("BudgetBurnsSlowly",)),
    "a prepaid run": (steps(60, spent=0, before=1.0), 60, ()),
    "slow steps on their plan": (steps(200, every=15, planned=200), 200, ()),
    "slow steps that cost half as much again": (steps(200, every=15, spent=1.5), 200, ("BudgetBurnsSlowly",)),
    "a tenth too fast is within the rounding": (steps(200, every=15, spent=1.05), 200, ()),
    "the ledger answers": (constant(5, raycloak_ledger_up=1), 5, ()),
    "the ledger is away": (constant(5, raycloak_ledger_up=0), 5, ("LedgerDown",)),
    "the ledger is away for a scrape": ({"raycloak_ledger_up": [1, 1, 0, 1, 1]}, 2, ()),
    "the witness keeps heads": (constant(5, raycloak_ledger_witness_up=1), 5, ()),
    "the witness was silent, and the page is gone": (
        {"raycloak_ledger_witness_up": [1, 1, 0, "stale", "_", "_"]},
        5,
        ("WitnessSilent",),
    ),
    "a run fails and is gone": (
        {f'raycloak_run_state{{{R},state="failed"}}': [0, 0, 1, "stale", "_"]},
        4,
        ("RunFailed",),
    ),
    "a run was stopped": ({f'raycloak_run_state{{{R},state="failed"}}': [0, 0, 0, "stale", "_"]}, 4, ()),
    "a run is killed": (
        {
            f'raycloak_run_state{{{R},state="training"}}': [1, 1, "stale", *"_" * 20],
            f'raycloak_run_state{{{R},state="complete"}}': [0, 0, "stale", *"_" * 20],
            f"raycloak_run_info{{{R}}}": [1, 1, "stale", *"_" * 20],
        },
        15,
        ("RunVanished",),
    ),
    "a run cannot be read for three minutes": (
        {
            f'raycloak_run_state{{{R},state="training"}}': [1, 1, "stale", *"_" * 20],
            f"raycloak_run_info{{{R}}}": [1, 1, "stale", *"_" * 20],
        },
        5,
        (),
    ),
    "a run is complete, and its page gone": (
        {
            f'raycloak_run_state{{{R},state="training"}}': [1, 0, "stale", *"_" * 20],
            f'raycloak_run_state{{{R},state="complete"}}': [0, 1, "stale", *"_" * 20],
            f"raycloak_run_info{{{R}}}": [1, 1, "stale", *"_" * 20],
        },
        15,
        (),
    ),
    "a killed run is resumed elsewhere": (
        {
            'raycloak_run_state{run="r",instance="i",state="training"}': [1, 1, "stale", *"_" * 20],
            'raycloak_run_state{run="r",instance="j",state="training"}': ["_", "_", "_", *[1] * 20],
            'raycloak_run_info{run="r",instance="j"}': ["_", "_", "_", *[1] * 20],
        },
        15,
        (),
    ),
    "no first step within ten minutes": (
        constant(20, **{f"raycloak_run_start_timestamp_seconds{{{R}}}": 0}),
        15,
        ("StepsStalled",),
    ),
    "the first step begins late": (constant(20, **{f"raycloak_run_start_timestamp_seconds{{{R}}}": 0}), 11, ()),
    "the first step takes half an hour": (steps(60, every=30, planned=8, spent=0), 29, ("StepsStalled",)),
    "a step of twenty minutes takes half an hour": (
        {
            f"raycloak_last_commit_timestamp_seconds{{{R}}}": [0] * 40,
            f"raycloak_step_duration_seconds_sum{{{R}}}": [12_000] * 40,
            f"raycloak_step_duration_seconds_count{{{R}}}": [10] * 40,
        },
        30,
        (),
    ),
    "a step of a second takes half an hour": (
        {
            f"raycloak_last_commit_timestamp_seconds{{{R}}}": [0] * 40,
            f"raycloak_step_duration_seconds_sum{{{R}}}": [10] * 40,
            f"raycloak_step_duration_seconds_count{{{R}}}": [10] * 40,
        },
        30,
        ("StepsStalled",),
    ),
    "every third attempt fails": (
        {
            f"raycloak_step_attempts_failed_total{{{R}}}": [0] * 10 + [1, 2, 3, 4] + [4] * 20,
            f"raycloak_step_attempts_total{{{R}}}": range(34),
        },
        14,
        ("AttemptsFailing",),
    ),
    "two attempts fail": (
        {
            f"raycloak_step_attempts_failed_total{{{R}}}": [0] * 10 + [2] * 20,
            f"raycloak_step_attempts_total{{{R}}}": range(30),
        },
        12,
        (),
    ),
    "one in ten attempts fails": (
        {
            f"raycloak_step_attempts_failed_total{{{R}}}": range(30),
            f"raycloak_step_attempts_total{{{R}}}": range(0, 300, 10),
        },
        20,
        (),
    ),
    "members were lost down to the minimum": (workers(2, 2, 4), 5, ("MembersNearMinimum",)),
    "a member was lost just now": (
        workers(4, 2, 4) | {f"raycloak_workers_admitted{{{R}}}": [4, 4, 2]},
        2,
        (),
    ),
    "one member may still be lost": (workers(3, 2, 4), 5, ()),
    "a run that needs all its members": (workers(4, 4, 4), 5, ()),
    "evidence is not renewed": (
        constant(20, **{f'raycloak_evidence_expiry_timestamp_seconds{{{R},role="worker"}}': 1500}),
        18,
        ("EvidenceExpiring",),
    ),
    "evidence is about to be renewed": (
        constant(20, **{f'raycloak_evidence_expiry_timestamp_seconds{{{R},role="worker"}}': 1500}),
        16,
        (),
    ),
    "evidence is renewed in time": (
        {f'raycloak_evidence_expiry_timestamp_seconds{{{R},role="worker"}}': [60 * m + 1200 for m in range(21)]},
        18,
        (),
    ),
    "a run's collateral ends tomorrow": (
        constant(20, **{f"raycloak_collateral_expiry_timestamp_seconds{{{R}}}": 80_000}),
        15,
        ("CollateralAgeing",),
    ),
    "a service's collateral ends tomorrow": (
        constant(20, **{'raycloak_service_collateral_expiry_timestamp_seconds{instance="i"}': 80_000}),
        15,
        ("CollateralAgeing",),
    ),
    "collateral is about to be fetched": (
        constant(20, **{f"raycloak_collateral_expiry_timestamp_seconds{{{R}}}": 80_000}),
        5,
        (),
    ),
    "collateral ends in two days": (
        constant(20, **{f"raycloak_collateral_expiry_timestamp_seconds{{{R}}}": 2 * 86_400}),
        15,
        (),
    ),
    "collateral ends next month": (
        constant(20, **{f"raycloak_collateral_expiry_timestamp_seconds{{{R}}}": 30 * 86_400}),
        15,
        (),
    ),
    "the orchestrator hangs": (
        constant(10, **{'raycloak_service_oldest_call_timestamp_seconds{instance="i"}': 60}),
        5,
        ("ServiceQueueSlow",),
    ),
    "a call waits for the disk": (
        {'raycloak_service_oldest_call_timestamp_seconds{instance="i"}': [0, 60, 60, 180]},
        2,
        (),
    ),
    "no call waits": (
        {'raycloak_service_oldest_call_timestamp_seconds{instance="i"}': [60 * minute for minute in range(11)]},
        5,
        (),
    ),
    "one call in twenty waits for long": (waits(10, 5), 8, ("ServiceQueueSlow",)),
    "calls are answered at once": (waits(10, 0), 8, ()),
    "the service could not write, and ended": (
        {'raycloak_service_up{instance="i"}': [1, 0, "stale", "_", "_", "_"]},
        5,
        ("ServiceDown",),
    ),
    "the service is gone": ({'raycloak_service_up{instance="i"}': [1, 1, "stale", "_", "_", "_"]}, 5, ("ServiceDown",)),
    "the service is missed by a scrape": (
        {'raycloak_service_up{instance="i"}': [1, 1, "stale", 1, 1]},
        2,
        (),
    ),
    "the service of a run ends with it": (
        {
            'raycloak_service_up{instance="i"}': [1, 1, "stale", "_", "_", "_"],
            f"raycloak_run_info{{{R}}}": [1, 1, "stale", "_", "_", "_"],
        },
        5,
        (),
    ),
    "the service works": (constant(5, **{'raycloak_service_up{instance="i"}': 1}), 5, ()),
    "the store of a training service is silent": (
        constant(10, **{'raycloak_training_service_up{instance="i"}': 0}),
        8,
        ("TrainingServiceDown",),
    ),
    "a training service is gone": (
        {'raycloak_training_service_up{instance="i"}': [1, 1, "stale", "_", "_", "_"]},
        5,
        ("TrainingServiceDown",),
    ),
    "a training service missed a scrape": (
        {'raycloak_training_service_up{instance="i"}': [1, 1, "stale", 1, 1, 0, 1]},
        6,
        (),
    ),
    "no operation ends": (operations(60, done=0, failed=0), 50, ("TrainingServiceStalled",)),
    "an operation waits behind the others": (operations(60, done=1, failed=0), 50, ()),
    "operations are young": (operations(25, done=0, failed=0), 24, ()),
    "one operation in four fails": (operations(30, done=3, failed=1), 20, ("TrainingServiceFailing",)),
    "one operation in ten fails": (operations(30, done=9, failed=1), 20, ()),
    "the only operation fails": (
        {
            'raycloak_training_service_operations_total{instance="i",kind="load_state",outcome="failed"}': [0, 0]
            + [1] * 10
        },
        8,
        (),
    ),
    "an adapter's tokens end within a day": (
        {'raycloak_adapter_tokens_left{instance="i"}': range(1000, 700, -1)},
        60,
        ("AdapterTokensEndSoon",),
    ),
    "an adapter's tokens are spent": (
        constant(20, **{'raycloak_adapter_tokens_left{instance="i"}': 0}),
        15,
        ("AdapterTokensEndSoon",),
    ),
    "an adapter's tokens last for a week": (
        {'raycloak_adapter_tokens_left{instance="i"}': range(10_000, 9_700, -1)},
        60,
        (),
    ),
    "an adapter that nobody asks": (constant(20, **{'raycloak_adapter_tokens_left{instance="i"}': 64}), 15, ()),
    "a client is refused at every second call": (adapter_calls(20, ok=1, replayed=1), 18, ("AdapterRefusing",)),
    "one call of an adapter in ten is refused": (adapter_calls(20, ok=9, busy=1), 18, ()),
    "three calls of an adapter were refused": (
        {'raycloak_adapter_calls_total{instance="i",method="Begin",code="busy"}': [0, 0] + [3] * 18},
        10,
        (),
    ),
    "the worker of an adapter died": (
        {'raycloak_adapter_calls_total{instance="i",method="Apply",code="worker_gone"}': ["_", "_", *[1] * 8]},
        6,
        ("AdapterDown",),
    ),
    "the server of an adapter is gone": (
        {'raycloak_adapter_sessions{instance="i"}': [1, 1, "stale", "_", "_", "_"]},
        5,
        ("AdapterDown",),
    ),
    "the server of an adapter missed a scrape": (
        {'raycloak_adapter_sessions{instance="i"}': [1, 1, "stale", 1, 1]},
        4,
        (),
    ),
    "a GPU loses memory": (
        {'raycloak_gpu_ecc_errors_total{node="n",gpu="0",kind="uncorrected"}': [7] * 10 + [8] * 20},
        20,
        ("GpuMemoryErrors",),
    ),
    "a GPU lost memory long ago, and corrects some": (
        {
            'raycloak_gpu_ecc_errors_total{node="n",gpu="0",kind="uncorrected"}': [7] * 30,
            'raycloak_gpu_ecc_errors_total{node="n",gpu="0",kind="corrected"}': range(30),
        },
        20,
        (),
    ),
    "confidential compute is off": (gpu(3, "off", "amd_sev_snp+nvidia_gpu"), 2, ("GpuUnprotected",)),
    "devtools protect nothing": (gpu(3, "devtools", "intel_tdx"), 2, ("GpuUnprotected",)),
    "confidential compute is on": (gpu(3, "on", "intel_tdx"), 2, ()),
    "protected PCIe is on": (gpu(3, "ppcie", "intel_tdx"), 2, ()),
    "nobody claims hardware": (gpu(3, "off", "simulated"), 2, ()),
    "a GPU is too hot": (
        constant(10, **{'raycloak_gpu_thermal_slowdown{node="n",gpu="0"}': 1}),
        8,
        ("GpuThermalSlowdown",),
    ),
    "a GPU is too hot for a minute": ({'raycloak_gpu_thermal_slowdown{node="n",gpu="0"}': [0, 0, 1, 0, 0, 0]}, 2, ()),
    "objects are spilled": (
        constant(3, **{'ray_object_store_memory{instance="i",Location="SPILLED"}': 4096}),
        2,
        ("ObjectsSpilled",),
    ),
    "objects are in memory": (
        constant(
            3,
            **{
                'ray_object_store_memory{instance="i",Location="MMAP_SHM"}': 4096,
                'ray_object_store_memory{instance="i",Location="SPILLED"}': 0,
            },
        ),
        2,
        (),
    ),
}


def promtool(*arguments):
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)


def test_the_operator_gets_the_same_rules():
    assert RULES_RESOURCE.read_text() == rules_resource(), "run: python -m raycloak_lab.dashboards.render"
    resource = yaml.safe_load(RULES_RESOURCE.read_text())
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"] == yaml.safe_load(RULES.read_text())


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_severity_and_a_short_runbook(name):
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    page, anchor = alert["annotations"]["runbook"].split("#")
    assert anchor == name.lower()
    (runbook,) = re.findall(rf"^### {name}\n\n(.*?)(?=^#|\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert [line.partition("**")[2].partition("**")[0] for line in runbook.split("\n* ")] == [
        "Means",
        "Look at",
        "Do",
    ]
    assert len(runbook.strip().splitlines()) <= 6


@pytest.mark.parametrize("name", [*ALERTS, *RECORDED])
def test_every_series_of_a_rule_is_exported_or_recorded_by_another(name):
    expr = (ALERTS | RECORDED)[name]["expr"]
    named = set(re.findall(r"[a-z]+:raycloak_\w+:\w+|(?<![\w:])raycloak_\w+|ray_\w+", expr))
    assert named
    assert named <= set(EXPORTED) | set(RECORDED) | {"ray_object_store_memory"}
    for metric, selector in re.findall(r"(raycloak_\w+)\{([^}]*)\}", expr):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= set(EXPORTED[metric].label_names)


@needs_promtool
def test_prometheus_accepts_the_scrape_configuration_of_the_document(tmp_path):
    """It names the pages of runs, of services and of Ray, whose series the rules and dashboards read."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (block,) = re.findall(r"```yaml\n(rule_files:.*?)```", page, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(block.replace("metrics/rules/", f"{RULES.resolve().parent}/"))
    result = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert result.returncode == 0, result.stderr
    assert {job["job_name"] for job in yaml.safe_load(block)["scrape_configs"]} == {
        "raycloak",
        "raycloak-service",
        "raycloak-training-service",
        "ray",
    }


def test_every_alert_has_a_case_in_which_it_fires():
    assert {f"Raycloak{alert}" for *_, fires in CASES.values() for alert in fires} == set(ALERTS)


@needs_promtool
def test_prometheus_accepts_the_rules():
    result = promtool("check", "rules", *map(str, FILES))
    assert result.returncode == 0, result.stderr


@needs_promtool
def test_each_alert_fires_in_its_case_and_no_other_does(tmp_path):
    tests = [
        {
            "interval": "1m",
            "name": name,
            "input_series": [
                {"series": key, "values": " ".join(str(value) for value in values)} for key, values in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": f'{{alertname="Raycloak{each}"}}', "value": 1} for each in fires],
                }
            ],
        }
        for name, (series, minute, fires) in CASES.items()
    ]
    (tmp_path / "cases.yml").write_text(yaml.safe_dump({"rule_files": [*map(str, FILES)], "tests": tests}))
    result = promtool("test", "rules", str(tmp_path / "cases.yml"))
    assert result.returncode == 0, result.stdout + result.stderr
