"""The dashboard as Grafana reads it: where data comes from, units, legends, and rates of the right
kinds of metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_dashboards import EXPORTED, METRICS_PAGE, OF_THE_SCRAPE, metrics_in

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "grafana" / "firsttoken.json").read_text(encoding="utf-8")
)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_GRAFANA = {"__rate_interval"}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EACH_PANEL = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
KINDS: dict[str, str] = dict(
    re.findall(r"^\| `([\w:]+)` \| (\w+) \|", METRICS_PAGE.read_text(encoding="utf-8"), re.M)
)
# Of what a metric's name ends with, and of a ratio of two of a kind.
UNITS = {"_seconds": "s", "_bytes": "bytes", "_perc": "percentunit"}


def targets(panel: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Expression, legend, and the unit in which it is shown."""
    defaults = panel["fieldConfig"]["defaults"]["unit"]
    by_legend = {
        override["matcher"]["options"]: {p["id"]: p["value"] for p in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }
    assert set(by_legend) <= {target["legendFormat"] for target in panel["targets"]}
    for target in panel["targets"]:
        legend = target["legendFormat"]
        yield target["expr"], legend, by_legend.get(legend, {}).get("unit", defaults)


def kind(name: str) -> str:
    """Of a sample's metric, as docs/metrics.md tells it: gauge, counter, part of a histogram."""
    for suffix in ("_bucket", "_count", "_sum"):
        if KINDS.get(name.removesuffix(suffix)) == "histogram" and name.endswith(suffix):
            return suffix[1:]
    return KINDS[name]


def test_it_asks_which_prometheus_and_which_models() -> None:
    assert DASHBOARD["schemaVersion"] >= 36  # data sources are objects since then
    assert DASHBOARD["uid"] and DASHBOARD["title"]
    variables = DASHBOARD["templating"]["list"]
    assert [one["name"] for one in variables] == ["datasource", "model"]
    assert (variables[0]["type"], variables[0]["query"]) == ("datasource", "prometheus")
    assert variables[1]["datasource"] == SOURCE
    assert variables[1]["multi"] and variables[1]["includeAll"]


@EACH_PANEL
def test_a_panel_shows_what_it_asks_that_source_for(panel: dict[str, Any]) -> None:
    assert panel["type"] == "timeseries" and panel["title"] and panel["description"]
    assert panel["datasource"] == SOURCE
    ids = [target["refId"] for target in panel["targets"]]
    assert ids and len(set(ids)) == len(ids)
    defined = OF_GRAFANA | {one["name"] for one in DASHBOARD["templating"]["list"]}
    for target in panel["targets"]:
        assert target["datasource"] == SOURCE
        assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= defined
        for name, selected in metrics_in(target["expr"])[0].items():
            models = {"model_name", "gen_ai_request_model"} & EXPORTED[name]
            assert models <= selected, "shows models that were not chosen"


@EACH_PANEL
def test_legends_have_the_labels_that_they_name(panel: dict[str, Any]) -> None:
    for expr, legend, _ in targets(panel):
        found, by = metrics_in(expr)
        is_summed = re.search(r"\b(sum|min|max|avg|count)\b", expr) is not None
        labels = by if is_summed else set.union(*(EXPORTED[n] for n in found)) | OF_THE_SCRAPE
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels - {"le"}, legend


@EACH_PANEL
def test_what_only_grows_is_shown_as_a_rate_and_nothing_else_is(panel: dict[str, Any]) -> None:
    for expr, _, _ in targets(panel):
        for name in metrics_in(expr)[0]:
            rated = re.findall(rf"rate\({name}(?:\{{[^}}]*\}})?\[\$__rate_interval\]\)", expr)
            times = len(re.findall(rf"(?<![\w:]){name}(?![\w:])", expr))
            assert len(rated) == (0 if kind(name) == "gauge" else times), name
            if kind(name) == "bucket":
                quantile = rf"histogram_quantile\(0\.\d+, sum by \(le[^)]*\) \(rate\({name}"
                assert re.match(quantile, expr), name


@EACH_PANEL
def test_units_are_those_of_the_metrics(panel: dict[str, Any]) -> None:
    for expr, legend, unit in targets(panel):
        kinds = {kind(name) for name in metrics_in(expr)[0]}
        names = {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in metrics_in(expr)[0]}
        if kinds in ({"bucket"}, {"gauge"}, {"sum", "count"}):
            ends = {end for end in UNITS if any(name.endswith(end) for name in names)}
            assert unit == (UNITS[ends.pop()] if ends else "short"), legend
        elif "/" in expr:
            assert unit == "percentunit", legend
        else:  # so many a second
            assert unit == "short", legend
