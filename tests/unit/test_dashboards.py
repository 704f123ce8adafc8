"""docs/grafana and docs/alerts.yml ask only for metrics, and labels of them, that are exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from engine_service.messages import CoreStats
from engine_service.service_metrics import ServiceMetrics
from http_facade.metrics import FacadeMetrics
from traces.setup import Tracing

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana" / "firsttoken.json"
ALERTS = DOCS / "alerts.yml"
METRICS_PAGE = DOCS / "metrics.md"
OF_THE_SCRAPE = {"job", "instance"}
SUFFIXES = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_count", "_sum")}
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "bool", "offset"}


def registries() -> tuple[CollectorRegistry, CollectorRegistry]:
    """Of engine and facade."""
    service, facade = ServiceMetrics("m"), FacadeMetrics(Tracing())
    service.watch_core(CoreStats)
    service.watch_tracing(lambda: 0)
    return service.registry, facade._registry


def exported() -> dict[str, set[str]]:
    """Labels by sample name."""
    found: dict[str, set[str]] = {}
    for registry in registries():
        found.update(labels_of(registry))
    return {name: labels for name, labels in found.items() if not name.endswith("_created")}


def labels_of(registry: CollectorRegistry) -> Iterator[tuple[str, set[str]]]:
    for family in registry.collect():
        for sample in family.samples:
            yield sample.name, set(sample.labels)
    for collector, names in registry._collector_to_names.items():
        if isinstance(collector, MetricWrapperBase):  # that has no sample before its first label
            suffixes = SUFFIXES[type(collector)]
            for name in names:
                if name.endswith(suffixes):
                    extra = {"le"} if name.endswith("_bucket") else set()
                    yield name, {*collector._labelnames, *extra}


EXPORTED = exported()


def expressions() -> Iterator[tuple[str, str]]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.findall(r"[\w:]+", variable["query"]["query"])[1:]
            yield f"${variable['name']}", f"sum by ({label}) ({metric})"
    for rule in rules():
        yield rule["alert"], rule["expr"]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def metrics_in(expr: str) -> tuple[dict[str, set[str]], set[str]]:
    """Metrics with the labels that they are selected by, and the labels that results are by."""
    by = {
        label
        for group in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expr)
        for label in re.findall(r"\w+", group)
    }
    text = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", "", expr)
    text = re.sub(r"\[[^\]]*\]", "", text)
    found: dict[str, set[str]] = {}
    for name, follows in re.findall(
        r"(?<![\w:])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\}|\()?", without_strings(text)
    ):
        if follows == "(" or name in WORDS:
            continue
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", follows))
    return found, by


def without_strings(text: str) -> str:
    return re.sub(r'"[^"]*"', '""', text)


@pytest.mark.parametrize(
    ("expr", "metrics", "by"),
    [
        ("sum by (a, b) (rate(x:y_total[5m])) / z", {"x:y_total": set(), "z": set()}, {"a", "b"}),
        ('x{a=~"y{", b!="c"} > 0 and w == 1e3', {"x": {"a", "b"}, "w": set()}, set()),
    ],
)
def test_expressions_are_read(expr: str, metrics: dict[str, set[str]], by: set[str]) -> None:
    assert metrics_in(expr) == (metrics, by)


@pytest.mark.parametrize(("where", "expr"), list(expressions()), ids=lambda value: value[:40])
def test_what_is_asked_for_is_exported(where: str, expr: str) -> None:
    metrics, by = metrics_in(expr)
    assert metrics, where
    for name, selected in metrics.items():
        assert name in EXPORTED, (where, name)
        labels = EXPORTED[name] | OF_THE_SCRAPE
        assert selected <= labels, (where, name)
        assert by <= labels, (where, name)
    assert expr.count("(") == expr.count(")")


def test_alerts_have_what_people_need() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        said = " ".join(rule["annotations"].values())
        _, by = metrics_in(rule["expr"])
        kept = by or {"model_name", "instance"}
        assert set(re.findall(r"\$labels\.(\w+)", said)) <= kept, rule["alert"]


def test_probes_are_no_answers_that_fail() -> None:
    """A facade whose engines load answers them with 503; and they would thin out what fails."""
    for rule in rules():
        answers = re.findall(r"http_server_answers_total(\{[^}]*\})?", rule["expr"])
        for selected in answers:
            assert 'http_route!~"/healthz|/readyz|/metrics"' in selected, rule["alert"]


def test_panels_have_titles_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_page_tells_of_every_metric_and_of_no_other() -> None:
    """Histograms stand there without their samples' suffixes."""
    text = METRICS_PAGE.read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `([\w:]+)` \| (\w+) \|", text, re.M))
    for registry in registries():
        for family in registry.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert told[name] == family.type, name
    samples = {name: {name, *(f"{name}_{s}" for s in ("bucket", "count", "sum"))} for name in told}
    assert set(EXPORTED) - set().union(*samples.values()) == set()
    assert {name for name in told if not samples[name] & set(EXPORTED)} == set()
