"""Write the Grafana dashboards and the rules for the operator into a checkout.

``python -m raycloak_lab.dashboards.render`` does it.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

from raycloak_lab.dashboards.adapter import ADAPTER_DASHBOARD
from raycloak_lab.dashboards.fleet import FLEET_DASHBOARD
from raycloak_lab.dashboards.gpu_and_evidence import GPU_DASHBOARD
from raycloak_lab.dashboards.panels import Annotation, Dashboard, Panel, PromQuery, Row, Variable
from raycloak_lab.dashboards.run import RUN_DASHBOARD
from raycloak_lab.dashboards.service import SERVICE_DASHBOARD
from raycloak_lab.dashboards.training_service import TRAINING_SERVICE_DASHBOARD

DASHBOARDS = (FLEET_DASHBOARD, RUN_DASHBOARD, GPU_DASHBOARD, SERVICE_DASHBOARD, TRAINING_SERVICE_DASHBOARD)
CHECKOUT = Path(__file__).resolve().parents[3]
FOLDER = CHECKOUT / "metrics" / "dashboards"
FILES = {FOLDER / board.file: board for board in DASHBOARDS} | {
    Path(__file__).with_name(ADAPTER_DASHBOARD.file): ADAPTER_DASHBOARD
}
"""All dashboards by their files: raycloak carries its own, and raycloak-lab that of adapters."""
RULES = CHECKOUT / "metrics" / "rules" / "raycloak.rules.yml"
RULES_RESOURCE = CHECKOUT / "deploy" / "prometheus-rules.yaml"
# Grafana's own grid.
GRID_WIDTH = 24
# Each Grafana has data sources of its own, so the reader picks one by a variable.
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def rules_resource() -> str:
    """Return the rules as a resource of the Prometheus operator."""
    head = """# The alerts, for the Prometheus operator; metrics/rules/raycloak.rules.yml has them without it.
# Written by python -m raycloak_lab.dashboards.render
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: raycloak
  labels:
    app.kubernetes.io/name: raycloak
spec:
"""
    rules = RULES.read_text(encoding="utf-8")
    # The comment above the groups says where this file comes from.
    return head + textwrap.indent(rules[rules.index("groups:") :], "  ")


def render(board: Dashboard) -> str:
    """Return a dashboard as JSON text, the same bytes at every call."""
    return json.dumps(as_json(board), indent=2) + "\n"


def as_json(board: Dashboard) -> dict[str, Any]:
    """Return a dashboard in Grafana's classic JSON model."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["raycloak", "privacy"],
        "schemaVersion": 39,
        "version": 1,
        # Grafana gives it a number of its own.
        "id": None,
        # The file is generated: a change made in Grafana would be lost.
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_annotation(each) for each in board.annotations]},
        "links": [_LINKS],
        "templating": {"list": [_SOURCE_CHOICE, *map(_variable, board.variables)]},
        "panels": _laid_out(board.rows),
    }


_SOURCE_CHOICE = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
# To every dashboard of raycloak, with the same run and the same time.
_LINKS = {
    "title": "raycloak",
    "type": "dashboards",
    "tags": ["raycloak"],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
}


def _variable(variable: Variable) -> dict[str, Any]:
    several = {"includeAll": True, "multi": True, "allValue": ".*"} if variable.many else {}
    return {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
    } | several


def _annotation(annotation: Annotation) -> dict[str, Any]:
    return {
        "name": annotation.name,
        "datasource": _DATASOURCE,
        "enable": True,
        "iconColor": annotation.color,
        "expr": annotation.expr,
        "step": "60s",
        "titleFormat": annotation.name,
        "useValueForTime": annotation.at_value,
    }


def _laid_out(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        grid = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": y}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": grid,
                "panels": [],
            }
        )
        x, y, line = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > GRID_WIDTH:
                x, y, line = 0, y + line, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, line = x + panel.width, max(line, panel.height)
        y += line
    return panels


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "targets": [_target(query, chr(ord("A") + i)) for i, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _target(query: PromQuery, letter: str) -> dict[str, Any]:
    target = {"refId": letter, "datasource": _DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
    return target | ({"exemplar": True} if query.exemplar else {})


def _field_defaults(panel: Panel) -> dict[str, Any]:
    steps = [{"value": value if i else None, "color": color} for i, (value, color) in enumerate(panel.steps)]
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    defaults |= {name: limit for name, limit in zip(("min", "max"), panel.limits, strict=True) if limit is not None}
    if panel.mappings:
        defaults["mappings"] = [
            {
                "type": "range",
                "options": {"from": low, "to": high, "result": {"text": text, "color": color, "index": i}},
            }
            for i, (low, high, text, color) in enumerate(panel.mappings)
        ]
    if panel.link is not None:
        title, url = panel.link
        defaults["links"] = [{"title": title, "url": url}]
    if panel.kind == "timeseries":
        defaults["custom"] = {"lineWidth": 2, "fillOpacity": 0, "showPoints": "never", "spanNulls": False}
        defaults["color"] = {"mode": "palette-classic"}
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "state-timeline":
        return {"showValue": "auto", "mergeValues": True, "legend": {"displayMode": "list", "placement": "bottom"}}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if panel.kind == "bargauge":
        options |= {"displayMode": "gradient", "orientation": "horizontal"}
    if panel.kind == "stat":
        options |= {"textMode": panel.text, "colorMode": "background", "graphMode": "none"}
    return options


if __name__ == "__main__":
    for file, board in FILES.items():
        file.write_text(render(board), encoding="utf-8")
    RULES_RESOURCE.write_text(rules_resource(), encoding="utf-8")
