"""A minute of work leaves the server's memory and its times flat; the judgement itself tells flat from not."""

import json
from pathlib import Path

import pytest

from crash.site import Plan
from crash.soak import Line, Soaked, soak

SECONDS = 60.0
MIB = 2**20


def soaked(rss_growth: float, latency_growth: float) -> Soaked:
    """Samples that grow by so much from the first to the last."""
    share = [i / 11 for i in range(12)]
    rss = [(60.0 * x, int(100 * MIB * (1 + rss_growth * x))) for x in share]
    return Soaked(rss, [(60.0 * x, 1e-3 * (1 + latency_growth * x), 2e-3, 100) for x in share], [])


@pytest.mark.parametrize(
    ("rss_growth", "latency_growth", "flat"),
    [(0.0, 0.0, True), (0.02, 0.1, True), (0.2, 0.0, False), (0.0, 1.0, False), (-0.5, -0.5, True)],
)
def test_growth_is_told_from_none(rss_growth: float, latency_growth: float, *, flat: bool) -> None:
    result = soaked(rss_growth, latency_growth).as_json()
    assert (result["memory_flat"] and result["latency_flat"]) is flat


def test_a_line_through_noise() -> None:
    line = Line.through([(float(i), 10.0 + (-1) ** i) for i in range(100)])
    assert line.mean == pytest.approx(10.0)
    assert abs(line.growth) < 0.01


def test_a_minute_of_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = soak(tmp_path, Plan(seed=1, schedulers=6, ranks=0, num_blocks=180, is_brief=True), SECONDS).as_json()
    with capsys.disabled():
        print(f"\n{json.dumps(result)}")  # noqa: T201
    assert not result["violations"]
    assert result["memory_flat"], "of the times a minute on a shared machine tells nothing"
