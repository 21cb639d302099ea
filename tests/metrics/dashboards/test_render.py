import json
import re
import shutil
import subprocess

import pytest
import yaml

from raycloak.metrics.dashboards.panels import ROWS, VERDICT
from raycloak.metrics.dashboards.render import PATH, render
from raycloak.metrics.registry import SERIES
from tests.metrics.samples import sample_names

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian package prometheus) is not installed")

EXPORTED = {name: series for series in SERIES if series.privacy.exportable for name in sample_names(series)}
RAY_METRICS = {"ray_object_store_memory"}
TARGET_LABELS = {"instance", "job", "namespace", "pod", "le"}
WORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "group_left", "group_right", "bool", "offset"}
PANELS = [panel for row in ROWS for panel in row.panels]
EXPRESSIONS = [query.expr for panel in PANELS for query in panel.queries]


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


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_metric_a_panel_queries_exists(expr):
    found = metrics_of(expr)
    assert found
    assert found <= set(EXPORTED) | RAY_METRICS


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_label_a_panel_selects_is_a_label_of_that_metric(expr):
    for metric, selector in re.findall(r"(raycloak_\w+)\{([^}]*)\}", expr):
        named = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert named <= set(EXPORTED[metric].label_names)


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_label_a_panel_groups_by_is_known(expr):
    known = (
        TARGET_LABELS | {"Location"} | {n for m in metrics_of(expr) & set(EXPORTED) for n in EXPORTED[m].label_names}
    )
    for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expr):
        assert {name.strip() for name in group.split(",")} <= known


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_expression_is_balanced(expr):
    assert balanced(expr)


def test_the_checks_see_what_they_look_for():
    assert metrics_of('sum by (a) (rate(x_total{b="c"}[5m])) / on (d) y or vector(0)') == {"x_total", "y"}
    assert not balanced("sum(x")
    assert not balanced("sum(x]")


def test_the_file_is_what_the_generator_writes():
    assert PATH.read_text() == render(), "run: python -m raycloak.metrics.dashboards.render"


def test_grafana_can_provision_it():
    board = json.loads(PATH.read_text())
    assert board["schemaVersion"] >= 39
    assert board["id"] is None
    assert "__inputs" not in board
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
    used = set(re.findall(r"\$(\w+)", " ".join(EXPRESSIONS))) - {"__rate_interval"}
    assert used == {v["name"] for v in board["templating"]["list"]} - {"datasource"}


def test_no_two_panels_overlap():
    cells = [
        (x, y)
        for panel in json.loads(PATH.read_text())["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)


def test_the_rows_cover_what_an_operator_watches():
    assert [row.title for row in ROWS] == [
        "Verdict",
        "Budget",
        "Spend against plan",
        "Steps and phases",
        "Workers and evidence",
        "Object store",
        "GPU",
    ]


def concrete(expr):
    for variable, value in {"$run": "r", "$account": "a", "$node": ".*", "$__rate_interval": "5m"}.items():
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


@needs_promtool
@pytest.mark.parametrize(
    ("up", "spent", "charged", "committed", "verdict"),
    [
        pytest.param(1, 0.50, 100, 100, 0, id="ok"),
        pytest.param(1, 0.00, 0, 0, 0, id="not-started"),
        pytest.param(1, 0.60, 100, 100, 1, id="ahead-of-plan"),
        pytest.param(1, 0.03, 3, 3, 0, id="too-early-to-tell"),
        pytest.param(1, 0.996, 200, 200, 2, id="exhausted"),
        pytest.param(1, 0.99, 100, 100, 1, id="one-more-step-is-just-affordable"),
        pytest.param(0, None, None, 100, 4, id="ledger-absent"),
        pytest.param(None, None, None, None, 4, id="nothing-scraped"),
    ],
)
def test_the_verdict_of_known_states(tmp_path, up, spent, charged, committed, verdict):
    series = {
        'raycloak_ledger_up{instance="i"}': up,
        'raycloak_ledger_up{instance="of another run"}': 1,
        'raycloak_run_info{instance="i",run="r",account="a"}': None if committed is None else 1,
        'raycloak_privacy_budget_spent_ratio{instance="i",account="a"}': spent,
        'raycloak_privacy_steps_charged_total{instance="i",account="a"}': charged,
        'raycloak_steps_committed_total{instance="i",run="r"}': committed,
        'raycloak_steps_planned{instance="i",run="r"}': 200,
    }
    case = {
        "interval": "1m",
        "input_series": [{"series": k, "values": f"{v}x5"} for k, v in series.items() if v is not None],
        "promql_expr_test": [
            {"expr": concrete(VERDICT), "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": verdict}]}
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    result = promtool("test", "rules", str(tmp_path / "test.yml"))
    assert result.returncode == 0, result.stdout + result.stderr
