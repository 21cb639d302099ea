import json
import re
import shutil
import subprocess

import pytest
import yaml

from raycloak.metrics.registry import SERIES
from raycloak_lab.adapter.collector import ADAPTER_SERIES
from raycloak_lab.dashboards.render import DASHBOARDS, FILES, FOLDER, render
from raycloak_lab.dashboards.run import VERDICT
from tests.metrics.samples import sample_names
from tests.offenders import offenders

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian package prometheus) is not installed")

EXPORTED = {
    name: series for series in (*SERIES, *ADAPTER_SERIES) if series.privacy.exportable for name in sample_names(series)
}
# Ray's own, Prometheus' own, and what the rules record.
OTHERS = {"ray_object_store_memory", "ALERTS", "run:raycloak_budget_burn:ratio1h"}
TARGET_LABELS = {"instance", "job", "namespace", "pod", "le"}
WORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "group_left", "group_right", "bool", "offset"}
EXPRESSIONS = [
    expr
    for board in FILES.values()
    for expr in (
        *(query.expr for row in board.rows for panel in row.panels for query in panel.queries),
        *(annotation.expr for annotation in board.annotations),
    )
]
BOARDS = pytest.mark.parametrize(("file", "board"), FILES.items(), ids=lambda each: getattr(each, "name", ""))


def metrics_of(expr):
    """Return the names in a PromQL expression that are neither functions, keywords nor labels."""
    bare = re.sub(r'"[^"]*"', "", expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    bare = re.sub(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    return {name for name in re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*(?!\w*\s*\()", bare) if name not in WORDS}


def balanced(expr):
    stack = []
    for character in re.sub(r'"[^"]*"', "", expr):
        if character in "([{":
            stack.append(character)
        elif character in ")]}" and (not stack or stack.pop() + character not in ("()", "[]", "{}")):
            return False
    return not stack


def queries_metrics_that_exist(expr):
    found = metrics_of(expr)
    assert found
    assert found <= set(EXPORTED) | OTHERS


def test_every_metric_a_panel_queries_exists():
    assert offenders(EXPRESSIONS, queries_metrics_that_exist) == {}


def selects_labels_of_its_metrics(expr):
    for metric, selector in re.findall(r"(raycloak_\w+)\{([^}]*)\}", expr):
        named = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        # Prometheus adds the address of the page.
        assert named <= {"instance", *EXPORTED[metric].label_names}


def test_every_label_a_panel_selects_is_a_label_of_that_metric():
    assert offenders(EXPRESSIONS, selects_labels_of_its_metrics) == {}


def groups_by_known_labels(expr):
    known = (
        TARGET_LABELS | {"Location"} | {n for m in metrics_of(expr) & set(EXPORTED) for n in EXPORTED[m].label_names}
    )
    for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expr):
        assert {name.strip() for name in group.split(",")} <= known


def test_every_label_a_panel_groups_by_is_known():
    assert offenders(EXPRESSIONS, groups_by_known_labels) == {}


def test_every_expression_is_balanced():
    assert [expr for expr in EXPRESSIONS if not balanced(expr)] == []


def test_the_checks_see_what_they_look_for():
    assert metrics_of('sum by (a) (rate(x_total{b="c"}[5m])) / on (d) y or vector(0)') == {"x_total", "y"}
    assert not balanced("sum(x")
    assert not balanced("sum(x]")


@BOARDS
def test_the_file_is_what_the_generator_writes(file, board):
    assert file.read_text() == render(board), "run: python -m raycloak_lab.dashboards.render"


def test_every_dashboard_has_a_file_and_every_file_a_dashboard():
    assert sorted(path.name for path in FOLDER.glob("*.json")) == sorted(board.file for board in DASHBOARDS)
    assert len({board.uid for board in FILES.values()}) == len(FILES)


@BOARDS
def test_grafana_can_provision_it(file, board):
    shown = json.loads(file.read_text())
    assert shown["schemaVersion"] >= 39
    assert shown["id"] is None
    assert "__inputs" not in shown
    ids = [panel["id"] for panel in shown["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in shown["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
    named = re.findall(r"\$(\w+)", " ".join(target["expr"] for p in shown["panels"] for target in p.get("targets", [])))
    chosen = {variable["name"] for variable in shown["templating"]["list"]} - {"datasource"}
    # The account's variable follows from the run's, which its own query names.
    assert set(named) - {"__rate_interval", "__range"} <= chosen
    assert chosen - {"run", "account"} <= set(named)


def test_every_link_of_a_panel_leads_to_a_dashboard_and_its_variable():
    variables = {board.uid: {variable.name for variable in board.variables} for board in DASHBOARDS}
    links = {panel.link[1] for board in DASHBOARDS for row in board.rows for panel in row.panels if panel.link}
    assert links
    for link in links:
        uid, variable = re.match(r"/d/([\w-]+)\?var-(\w+)=", link).groups()
        assert variable in variables[uid]


@BOARDS
def test_no_two_panels_overlap(file, board):
    cells = [
        (x, y)
        for panel in json.loads(file.read_text())["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)


@BOARDS
def test_a_row_of_panels_has_no_gap(file, board):
    lines = {}
    for panel in json.loads(file.read_text())["panels"]:
        lines.setdefault(panel["gridPos"]["y"], []).append(panel["gridPos"]["w"])
    assert {y: sum(widths) for y, widths in lines.items() if sum(widths) != 24} == {}


def test_the_rows_cover_what_an_operator_watches():
    assert {board.file: [row.title for row in board.rows] for board in DASHBOARDS} == {
        "fleet.json": ["Now", "Runs", "Accounts"],
        "run.json": [
            "Verdict",
            "Result",
            "Budget",
            "Spend against plan",
            "Steps and phases",
            "Workers",
            "Object store",
        ],
        "gpu-and-evidence.json": ["Evidence", "GPU"],
        "service.json": ["Service"],
        "training-service.json": ["Now", "Operations"],
    }


CHOSEN = {
    "$run": "r",
    "$account": "a",
    "$node": ".*",
    "$instance": ".*",
    "$__rate_interval": "5m",
    "$__range": "1h",
}


def concrete(expr):
    for variable, value in CHOSEN.items():
        expr = expr.replace(variable, value)
    return expr


def promtool(*arguments):
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)


@needs_promtool
def test_prometheus_parses_every_expression(tmp_path):
    rules = [{"record": f"a:b:c{i}", "expr": concrete(expr)} for i, expr in enumerate(EXPRESSIONS)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    result = promtool("check", "rules", str(tmp_path / "rules.yml"))
    assert result.returncode == 0, result.stderr


def states(**last):
    """Return the series of a run that trains, or whose page is gone after the minute in which it said how it ended."""
    known = ("training", "complete", "cap_exceeded", "early_stopped", "stopped", "failed")
    key = 'raycloak_run_state{{instance="i",run="r",state="{}"}}'
    if not last:
        return {key.format(state): f"{int(state == 'training')}x130" for state in known}
    return {key.format(state): f"{int(state == 'training')}x2 {last.get(state, 0)} stale" for state in known}


def verdict_at(tmp_path, minute, series, verdict):
    """Require the verdict's value at a minute of the series; None for no value at all."""
    samples = [] if verdict is None else [{"labels": "{}", "value": verdict}]
    case = {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [{"expr": concrete(VERDICT), "eval_time": f"{minute}m", "exp_samples": samples}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    result = promtool("test", "rules", str(tmp_path / "test.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("up", "spent", "planned", "prepaid", "verdict"),
    [
        # Spent share: at first, and more each minute; a step takes a minute.
        pytest.param(1, "0+0.005x130", 200, 0, 0, id="ok"),
        pytest.param(1, "0x130", 200, 0, 0, id="nothing-spent"),
        pytest.param(1, "0+0.007x130", 200, 0, 1, id="ahead-of-plan"),
        pytest.param(1, "0.3+0.005x130", 200, 0, 1, id="the-account-was-spent-by-others-before"),
        pytest.param(1, "0.3+0.0035x130", 200, 0, 0, id="the-plan-knew-of-the-others"),
        pytest.param(1, "0.4+0.005x118 0.995x20", 200, 0, 3, id="exhausted-and-ahead-of-plan"),
        pytest.param(1, "0.4+0.005x118 0.995x20", 121, 0, 0, id="the-last-step-is-paid"),
        pytest.param(1, "1x130", 200, 1, 0, id="prepaid"),
        pytest.param(0, None, 200, 0, 4, id="ledger-absent"),
    ],
)
def test_the_verdict_of_a_run_that_trains(tmp_path, up, spent, planned, prepaid, verdict):
    series = {
        **states(),
        'raycloak_ledger_up{instance="i"}': f"{up}x130",
        'raycloak_ledger_up{instance="of another run"}': "1x130",
        'raycloak_run_info{instance="i",run="r",account="a"}': "1x130",
        'raycloak_run_prepaid{instance="i",run="r"}': f"{prepaid}x130",
        'raycloak_steps_finished{instance="i",run="r"}': "0+1x130",
        'raycloak_steps_planned{instance="i",run="r"}': f"{planned}x130",
    }
    if spent is not None:
        series['raycloak_privacy_budget_spent_ratio{instance="i",account="a"}'] = spent
        series['raycloak_privacy_steps_charged_total{instance="i",account="a"}'] = "1+1x130"
    verdict_at(tmp_path, 120, series, verdict)


@needs_promtool
@pytest.mark.parametrize(
    ("last", "verdict"),
    [("complete", 8), ("cap_exceeded", 9), ("stopped", 10), ("failed", 11), ("training", 12), ("early_stopped", 13)],
)
def test_a_run_whose_page_is_gone_is_shown_as_it_ended(tmp_path, last, verdict):
    verdict_at(tmp_path, 30, states(**{last: 1}), verdict)


@needs_promtool
def test_a_run_that_nobody_has_seen_has_no_verdict(tmp_path):
    verdict_at(tmp_path, 30, {'raycloak_ledger_up{instance="of another run"}': "1x130"}, None)
