"""The exported metrics, parsed as Prometheus parses them."""

import re
from pathlib import Path

import pytest

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.ids import PoolName
from kvpool.server.metrics.observations import LIMIT_REASONS, Observations
from kvpool.server.metrics.server_metrics import sampler, server_metrics
from kvpool.v1 import pool_pb2
from kvpool.v1.pool_pb2 import PoolConfig, PoolInfo, RankInfo, RankState
from support.core import World
from support.exported_metrics import FixedCredentials, exported_labels, info_of, sample_of, scrape
from support.paths import ROOT
from support.transcripts import check


def busy_world() -> World:
    world = World(12, num_host_blocks=4)
    session = world.open()
    world.admit(session, 1, "ab", 8)
    world.admit(session, 2, "xyz", 12)
    world.free(session, 1)
    return world


def page(*_: str) -> list[str]:
    """The samples of a server with a pool at work and one that forms, under vLLM's names too."""
    ready, forming = info_of(busy_world()), PoolInfo(config=PoolConfig(name="f"), state=pool_pb2.POOL_STATE_FORMING)
    for state in (RankState.RANK_STATE_READY, RankState.RANK_STATE_LOST):
        ready.ranks.append(RankInfo(state=state))
    seen, kept = Observations(), BlockLifetimes(1, lambda _: 0)
    for seconds in (0.00004, 0.0001, 0.3, 99.0):
        seen.step(PoolName("m"), 256, seconds)
    seen.rpc("kvpool.v1.AllocatorService/GetPool", "NOT_FOUND", 0.001)
    seen.rpc("kvpool.v1.AllocatorService/Schedule", "ABORTED", None)
    seen.refusals["ROLE"] += 1
    seen.limit_refusals["OUT_OF_MEMORY"] += 1
    kept.lifetime.observe(3.0)
    lines = scrape([(ready, kept), (forming, None)], seen, with_vllm=True).splitlines()
    return [line for line in lines if not line.startswith(("#", "kvpool_build_info"))]


def test_every_figure_has_its_sample() -> None:
    check(Path(__file__).with_name("page.txt"), page)


def test_names_of_vllm_are_exported_on_request() -> None:
    assert "vllm:" not in scrape([(info_of(busy_world()), None)], Observations())


def test_all_reasons_of_exceeded_limits_are_exported() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "server").rglob("*.py") if path.name != "standby_check.py")
    raised = set(re.findall(r'(?:ExhaustedError|_too_many|StreamSlots)\([^")]*"([A-Z_]+)"', sources))
    assert len(raised) > 12
    assert raised <= set(LIMIT_REASONS)


def test_credentials_without_an_end_have_no_expiry() -> None:
    metrics = server_metrics({"tokens": FixedCredentials(1.5, None)}, {}, None)
    names = [s.name for metric in metrics for s in metric.samples if s.name.startswith("kvpool_credentials_")]
    assert names == ["kvpool_credentials_age_seconds"]


def test_measurements_of_a_removed_pool_are_deleted() -> None:
    seen = Observations()
    seen.step(PoolName("former"), 1, 0.1)
    assert "former" not in scrape([(info_of(World()), None)], seen)
    assert not seen.steps


def test_a_sample_does_not_change_later() -> None:
    seen = Observations()
    seen.step(PoolName("m"), 1, 0.1)
    render = sampler(lambda: [sample_of(info_of(World()), seen)], seen, lambda _: (), with_vllm=False)()
    seen.step(PoolName("m"), 1, 0.1)
    counts = [s.value for m in render() for s in m.samples if s.name == "kvpool_step_seconds_count"]
    assert counts == [1]


def test_help_texts_are_sentences_and_names_follow_the_conventions() -> None:
    for line in scrape([(info_of(busy_world()), None)], Observations()).splitlines():
        if line.startswith("# HELP"):
            _, _, name, text = line.split(" ", 3)
            assert text[0].isupper() or text[0].isdigit(), line
            assert text.endswith("."), line
            assert name.startswith("kvpool_"), line


@pytest.mark.parametrize(
    "file", ["prometheus/rules.yml", "prometheus/rules_test.yml", "grafana/dashboards/kvpool.json"]
)
def test_rules_and_dashboard_use_exported_names(file: str) -> None:
    """tests/compose/test_rules_and_dashboard.py compares labels and values, too."""
    used = set(re.findall(r"\bkvpool_\w+", (ROOT / "deploy" / file).read_text()))
    assert len(used) > 20
    assert used <= exported_labels().keys()
