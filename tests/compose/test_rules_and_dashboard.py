"""Rules, their tests and the dashboard of deploy/ use metrics, labels and values that servers and ranks export.

A misspelt metric or label makes no error in Prometheus: the alert never fires, or fires always.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from support.exported_metrics import exported_labels
from support.paths import ROOT
from support.promql import Expression, parse

DEPLOY: Final = ROOT / "deploy"
CLOSED: Final = ("state", "reason", "code", "role", "kind", "limit")
"""Labels whose values are lists in the code."""
SCRAPED: Final = {"instance", "job"}
"""Labels that Prometheus adds."""
Labels = dict[str, dict[str, set[str]]]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def jobs() -> set[str]:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    return {config["job_name"] for config in scraped}


def targets() -> list[dict[str, Any]]:
    panels = json.loads((DEPLOY / "grafana" / "dashboards" / "kvpool.json").read_text())["panels"]
    return [target for panel in panels for target in panel.get("targets", ())]


def known() -> Labels:
    """Labels and values of all metrics: exported ones, `up`, and those of recording rules."""
    found: Labels = {"up": defaultdict(set), **exported_labels()}
    for rule in rules():
        if "record" in rule:
            expression = parse(rule["expr"])
            labels = result_labels(expression, found)
            values = {
                label: set().union(*(found[each.name].get(label, ()) for each in expression.selectors))
                for label in labels
            }
            found[rule["record"]] = values
    return found


def result_labels(expression: Expression, known: Labels) -> set[str]:
    """The labels that the result of an expression has at most."""
    labels = {label for each in expression.selectors for label in known.get(each.name, ())} | SCRAPED
    return labels if expression.kept is None else labels & expression.kept


KNOWN: Final = known()


def mistakes(text: str, shown: set[str]) -> list[str]:
    """What an expression, and the labels that are shown of its result, name that does not exist."""
    expression = parse(text)
    return [
        *_mistakes_of_selectors(expression),
        *(
            f"label {label}"
            for label in sorted(
                expression.grouped - result_labels(Expression(expression.selectors, None, set()), KNOWN)
            )
        ),
        *(f"shown label {label}" for label in sorted(shown - result_labels(expression, KNOWN))),
    ]


def _mistakes_of_selectors(expression: Expression) -> Iterator[str]:
    for each in expression.selectors:
        if each.name not in KNOWN:
            yield f"metric {each.name}"
            continue
        labels = KNOWN[each.name]
        for label, values in each.values.items():
            if label not in labels.keys() | SCRAPED:
                yield f"{each.name}: label {label}"
            allowed = jobs() if label == "job" else labels.get(label, set())
            if label in (*CLOSED, "job"):
                yield from (f"{each.name}: {label} {value}" for value in values if value not in allowed)


def shown_in_annotations(rule: dict[str, Any]) -> set[str]:
    return set(re.findall(r"\$labels\.(\w+)", " ".join(rule.get("annotations", {}).values())))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_what_exists(rule: dict[str, Any]) -> None:
    assert parse(rule["expr"]).selectors
    assert mistakes(rule["expr"], shown_in_annotations(rule)) == []


@pytest.mark.parametrize("target", targets(), ids=lambda target: target["expr"])
def test_panels_use_what_exists(target: dict[str, Any]) -> None:
    assert parse(target["expr"]).selectors
    assert mistakes(target["expr"], set(re.findall(r"{{(\w+)}}", target["legendFormat"]))) == []


def test_variables_of_the_dashboard_use_what_exists() -> None:
    listed = json.loads((DEPLOY / "grafana" / "dashboards" / "kvpool.json").read_text())["templating"]["list"]
    queries = [
        re.fullmatch(r"label_values\((\w+), (\w+)\)", each["definition"]) for each in listed if "definition" in each
    ]
    assert queries
    for query in queries:
        assert query
        assert query[2] in KNOWN[query[1]].keys() | SCRAPED


def test_series_of_the_rules_tests_are_exported() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yml").read_text())["tests"]
    series = [each["series"] for test in tests for each in test["input_series"]]
    assert len(series) > 50
    assert [
        (each, mistakes(each, set())) for each in series if 'job="else"' not in each and mistakes(each, set())
    ] == []


@pytest.mark.parametrize(
    ("text", "shown", "found"),
    [
        ("rate(kvpool_steps_total[5m])", {"pool", "instance"}, []),
        ("rate(kvpool_step_total[5m])", set(), ["metric kvpool_step_total"]),
        ('kvpool_sessions{pol="a"}', set(), ["kvpool_sessions: label pol"]),
        ('kvpool_ranks{state=~"lost|gone"} > 0', set(), ["kvpool_ranks: state gone"]),
        ('up{job="kvpool"} == 0', set(), ["up: job kvpool"]),
        ("sum by (shard) (kvpool_sessions)", set(), ["label shard"]),
        ("sum by (pool) (kvpool_ranks)", {"state"}, ["shown label state"]),
        ("kvpool_journal_up == 0 unless on (pool) kvpool_journal_bytes > 2^30", set(), ["label pool"]),
        ("kvpool:ranks_missing offset 10m", {"rank"}, ["shown label rank"]),
        ('kvpool_sessions{pool=~"$pool"} and kvpool_door_refusals_total{reason="DOOR"}', set(),
         ["kvpool_door_refusals_total: reason DOOR"]),
    ],
)  # fmt: skip
def test_a_mistake_is_found(text: str, shown: set[str], found: list[str]) -> None:
    assert mistakes(text, shown) == found
