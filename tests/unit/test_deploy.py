"""What operators deploy is about metrics that there are, and each alert says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.cache.server.metric_names import METRICS

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "stoker-cache.json"
RUNBOOK = ROOT / "docs" / "how-to" / "runbook.md"
ADDED = {"job", "instance"}
"""Labels that Prometheus adds."""
BY_NAME = {metric.name: metric for metric in METRICS}


def alerts() -> list[dict[str, Any]]:
    said = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    return [rule for group in said["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    said: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return said


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def selectors(expression: str) -> Iterator[tuple[str, set[str], dict[str, str]]]:
    """Each metric of an expression: its own name, its labels in what is asked for, and the matchers."""
    for found in re.finditer(r"\b(stoker_\w+)(?:\{([^}]*)\})?", expression):
        name = found[1]
        base = re.sub("_(bucket|sum|count)$", "", name)
        is_histogram = name not in BY_NAME and base in BY_NAME and BY_NAME[base].kind == "histogram"
        matchers = dict(re.findall(r'(\w+)\s*[=!]~?\s*"([^"]*)"', found[2] or ""))
        yield base if is_histogram else name, set(matchers) | ({"le"} if is_histogram else set()), matchers


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_are_about_metrics_and_labels_that_there_are(where: str, expression: str) -> None:
    found = list(selectors(expression))
    assert found or where == "StokerCacheServerAway", "it is about nothing"
    labels = set(ADDED)
    for name, used, matchers in found:
        assert name in BY_NAME, f"{where}: there is no metric {name}"
        labels |= {*BY_NAME[name].labels, *(used & {"le"})}
        assert used <= {*BY_NAME[name].labels, *ADDED, "le"}, f"{where}: {name} has no such label"
        is_counter = BY_NAME[name].kind != "gauge"
        after = re.findall(rf"(\w+)\({name}\w*(?:\{{[^}}]*\}})?\[", expression)
        assert not is_counter or set(after) == {"rate"}, f"{where}: {name} only grows: take its rate"
        for label, values in (("source", "local peer origin"), ("reason", "room"), ("state", "")):
            if label in matchers and values:
                assert matchers[label] in values.split(), f"{where}: {label}"
    for names in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(names.replace(" ", "").split(",")) <= labels, f"{where}: by ({names})"


def test_every_metric_of_the_dashboard_has_a_place_once() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    variables = {one["name"] for one in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used == variables


def test_each_alert_has_its_entry_in_the_runbook_and_no_other_has() -> None:
    entries = re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    told = {entry.splitlines()[0]: entry for entry in entries}
    assert list(told) == [rule["alert"] for rule in alerts()]
    for name, entry in told.items():
        for part in ("**Means**", "**Look at**", "**Do**"):
            assert part in entry, f"{name}: {part}"
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/how-to/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_runbook_speaks_of_panels_that_there_are() -> None:
    titles = " | ".join(panel["title"] for panel in panels())
    for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", RUNBOOK.read_text()):
        assert name.removesuffix(" by dialect") in titles, name


def test_the_test_of_the_rules_knows_every_alert() -> None:
    said = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())
    asked = [one for test in said["tests"] for one in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alerts()}
    assert {one["alertname"] for one in asked if one.get("exp_alerts")} == names
    assert {one["alertname"] for one in asked if not one.get("exp_alerts")} == names


def test_prometheus_is_told_where_the_figures_are() -> None:
    said = yaml.safe_load((PROMETHEUS / "scrape.yml").read_text())
    (job,) = said["scrape_configs"]
    assert (job["job_name"], job["metrics_path"]) == ("stoker-cache", "/-/metrics")
    assert said["rule_files"] == ["alerts.yml"]


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool (Debian's package prometheus, 96 MB)")
    return found


def test_promtool_takes_the_rules_and_they_do_what_their_test_says(promtool: str) -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        said = subprocess.run(
            [promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False, timeout=120
        )
        assert said.returncode == 0, said.stdout + said.stderr


def test_promtool_takes_the_expressions_of_the_dashboard(tmp_path: Path, promtool: str) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (_, expression) in enumerate(expressions())
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    said = subprocess.run(
        [promtool, "check", "rules", str(tmp_path / "rules.yml")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
