"""Write ``raycloak.json``, the Grafana dashboard: ``python -m raycloak.metrics.dashboards.render``."""

import json
from pathlib import Path
from typing import Any

from raycloak.metrics.dashboards.panels import ROWS, Panel, PromQuery

PATH = Path(__file__).parent / "raycloak.json"
# Grafana's own grid.
GRID_WIDTH = 24
# Each Grafana has data sources of its own, so the reader picks one by a variable.
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def render() -> str:
    """Return the dashboard as JSON text, the same bytes at every call."""
    return json.dumps(dashboard(), indent=2) + "\n"


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's classic JSON model."""
    return {
        "uid": "raycloak",
        "title": "raycloak",
        "description": "A private training run: budget, steps, workers, evidence, GPUs.",
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
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": _laid_out(),
    }


def _variables() -> list[dict[str, Any]]:
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return [
        datasource,
        _variable("run", "label_values(raycloak_run_info, run)"),
        _variable("account", 'label_values(raycloak_run_info{run="$run"}, account)'),
        _variable("node", "label_values(raycloak_gpu_memory_total_bytes, node)") | {"includeAll": True, "multi": True},
    ]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
    }


def _laid_out() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
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
    return {"refId": letter, "datasource": _DATASOURCE, "expr": query.expr, "legendFormat": query.legend}


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
    if panel.kind == "stat":
        options |= {"textMode": panel.text, "colorMode": "background", "graphMode": "none"}
    return options


if __name__ == "__main__":
    PATH.write_text(render())
