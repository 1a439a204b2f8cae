"""Memory and time per step stay flat for a minute of work; the judgement detects growth."""

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from crash.site import Plan
from crash.soak import TOLERANCES, Line, Period, judged, soak

SECONDS = 60.0


def periods(**growth: float) -> list[Period]:
    """Twelve periods in which figures grow by the given amounts from the first to the last."""
    made = []
    for i in range(12):
        values = {name: 100.0 * (1 + growth.get(name, 0.0) * i / 11) for name in (*TOLERANCES, "yardstick_ms")}
        made.append(Period(at=60.0 * (i + 1), p99_ms=1.0, steps=100, **values))
    return made


@pytest.mark.parametrize("name", TOLERANCES)
def test_growth_is_detected(name: str) -> None:
    assert all(found["flat"] for found in judged(periods()).values())
    assert judged(periods(**{name: TOLERANCES[name]}))[name]["flat"], "the warm-up takes its share of it"
    grown = judged(periods(**{name: 2 * TOLERANCES[name]}))
    assert [each for each in grown if not grown[each]["flat"]] == [name]
    assert judged(periods(**{name: -0.5}))[name]["flat"]


def test_a_slower_machine_is_not_growth_of_the_server() -> None:
    slower = {"cpu_ms": 0.5, "p50_ms": 0.5, "yardstick_ms": 0.5}
    assert all(found["flat"] for found in judged(periods(**slower)).values())
    grown = judged(periods(**{**slower, "cpu_ms": 1.5}))
    assert [each for each in grown if not grown[each]["flat"]] == ["cpu_ms"]


def test_a_line_is_fitted_through_noise() -> None:
    line = Line.through([(float(i), 10.0 + (-1) ** i) for i in range(100)])
    assert line.mean == pytest.approx(10.0)
    assert abs(line.growth) < 0.01


@pytest.mark.complete
def test_the_memory_stays_flat_for_a_minute_of_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(seed=1, schedulers=6, ranks=0, num_blocks=180, is_brief=True)
    measured, violations = soak(tmp_path, plan, SECONDS)
    found = judged(measured)
    with capsys.disabled():
        print(f"\n{json.dumps({**found, 'periods': list(map(astuple, measured))})}")  # noqa: T201
    assert not violations
    assert found["rss_mib"]["flat"], "times of one minute on a shared machine mean nothing"
