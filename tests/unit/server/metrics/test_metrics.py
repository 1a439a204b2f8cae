"""The exported metrics, parsed as Prometheus parses them."""

import re

import pytest

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import PoolState
from kvpool.core.statistics import Histogram
from kvpool.server.metrics.observations import LIMIT_REASONS, REFUSAL_REASONS, Observations
from kvpool.server.metrics.server_metrics import sampler, server_metrics
from kvpool.v1 import pool_pb2
from kvpool.v1.pool_pb2 import PoolConfig, PoolInfo, RankInfo, RankState
from support.core import World
from support.exported_metrics import LIMITS, FixedCredentials, exported_labels, info_of, sample_of, samples_of, scrape
from support.paths import ROOT


def busy_world() -> World:
    world = World(12)
    session = world.open()
    world.admit(session, 1, "ab", 8)
    world.admit(session, 2, "xyz", 12)
    world.free(session, 1)
    return world


def test_every_sample_of_a_pool_matches_the_pool() -> None:
    info = info_of(busy_world())
    for state in (RankState.RANK_STATE_READY, RankState.RANK_STATE_LOST):
        info.ranks.append(RankInfo(state=state))
    samples = samples_of(scrape([(info, None)], Observations()))

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset({"pool": "m", **labels}.items())]

    assert value("kvpool_pool_blocks") == 11
    assert value("kvpool_pool_free_blocks") == info.free_blocks == 8
    assert value("kvpool_pool_used_blocks") == 3
    assert value("kvpool_pool_cached_blocks") == info.cached_blocks == 5
    assert value("kvpool_pool_usage_ratio") == info.usage
    assert value("kvpool_group_used_blocks", group="0", kind="full_attention") == 3
    assert value("kvpool_group_allocated_blocks_total", group="0", kind="full_attention") == 5
    missed = {"group": "0", "kind": "full_attention"}
    assert value("kvpool_prefix_cache_misses_total", **missed, reason="unseen") == 2
    assert value("kvpool_prefix_cache_missed_tokens_total", **missed, reason="unseen") == 12
    assert value("kvpool_prefix_cache_misses_total", **missed, reason="evicted") == 0
    assert value("kvpool_allocations_total") == 2
    assert value("kvpool_requests", state="running") == 1
    assert value("kvpool_requests", state="waiting") == 0
    assert value("kvpool_sessions_opened_total") == 1
    assert value("kvpool_ranks", state="ready") == value("kvpool_ranks", state="lost") == 1
    assert [value("kvpool_pool_state", state=state.value) for state in PoolState] == [0, 1, 0, 0]
    assert value("kvpool_block_event_batches_total") == 3
    assert value("kvpool_prefix_cache_lost_tokens_total", size="0.5") == 30
    assert value("kvpool_prefix_cache_gained_tokens_total", size="2") == 20
    assert value("kvpool_prefix_cache_gained_tokens_total", size="4") == 50
    journal = {name: samples[f"kvpool_journal_{name}", frozenset()] for name in ("up", "bytes", "records_total")}
    assert journal == {"up": 1, "bytes": 7, "records_total": 3}


def test_a_forming_pool_is_exported_as_empty() -> None:
    forming = PoolInfo(config=PoolConfig(name="m"), state=pool_pb2.POOL_STATE_FORMING)
    samples = samples_of(scrape([(forming, None)], Observations()))
    assert samples["kvpool_pool_blocks", frozenset({("pool", "m")})] == 0
    assert samples["kvpool_pool_used_blocks", frozenset({("pool", "m")})] == 0


def test_histograms_are_cumulative_and_exported_from_the_start() -> None:
    seen = Observations()
    for seconds in (0.00004, 0.0001, 0.3, 99.0):
        seen.step(PoolName("m"), 256, seconds)
    samples = samples_of(scrape([(info_of(World()), None)], seen))

    def bucket(name: str, bound: str) -> float:
        return samples[f"{name}_bucket", frozenset({("pool", "m"), ("le", bound)})]

    steps = "kvpool_step_seconds"
    assert [bucket(steps, bound) for bound in ("5e-05", "0.0001", "0.2", "0.5", "5.0", "+Inf")] == [1, 2, 2, 3, 3, 4]
    assert [bucket("kvpool_step_operations", bound) for bound in ("128.0", "256.0")] == [0, 4]
    assert samples["kvpool_block_lifetime_seconds_count", frozenset({("pool", "m")})] == 0


def test_calls_are_counted_by_method_and_code() -> None:
    seen = Observations()
    seen.rpc("kvpool.v1.AllocatorService/GetPool", "NOT_FOUND", 0.001)
    seen.rpc("kvpool.v1.AllocatorService/Schedule", "ABORTED", None)
    samples = samples_of(scrape([], seen))
    method = ("method", "kvpool.v1.AllocatorService/GetPool")
    assert samples["kvpool_rpcs_total", frozenset({method, ("code", "NOT_FOUND")})] == 1
    assert samples["kvpool_rpc_seconds_count", frozenset({method})] == 1
    streams = [name for name, labels in samples if ("method", "kvpool.v1.AllocatorService/Schedule") in labels]
    assert streams == ["kvpool_rpcs_total"]


def test_refusals_are_counted_by_reason_and_begin_with_0() -> None:
    seen = Observations()
    before = samples_of(scrape([], seen))
    seen.refusals["ROLE"] += 1
    seen.limit_refusals["OUT_OF_MEMORY"] += 1
    after = samples_of(scrape([], seen))
    for name, reasons in (
        ("kvpool_door_refusals_total", REFUSAL_REASONS),
        ("kvpool_limit_refusals_total", LIMIT_REASONS),
    ):
        assert {reason: before[name, frozenset({("reason", reason)})] for reason in reasons} == dict.fromkeys(
            reasons, 0
        )
    assert {key: value for key, value in after.items() if before[key] != value} == {
        ("kvpool_door_refusals_total", frozenset({("reason", "ROLE")})): 1,
        ("kvpool_limit_refusals_total", frozenset({("reason", "OUT_OF_MEMORY")})): 1,
    }


def test_all_reasons_of_exceeded_limits_are_exported() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "server").rglob("*.py") if path.name != "standby_check.py")
    raised = set(re.findall(r'(?:ExhaustedError|_too_many|StreamSlots)\([^")]*"([A-Z_]+)"', sources))
    assert len(raised) > 12
    assert raised <= set(LIMIT_REASONS)


def test_credentials_and_limits_are_exported() -> None:
    samples = samples_of(scrape([(info_of(World()), None)], Observations()))
    own = ("kvpool_credentials_", "kvpool_limit_usage_")
    assert {
        (name, *dict(labels).values()): value for (name, labels), value in samples.items() if name.startswith(own)
    } == {
        ("kvpool_credentials_age_seconds", "tokens"): 1.5,
        ("kvpool_credentials_age_seconds", "certificates"): 0.5,
        ("kvpool_credentials_expire_timestamp_seconds", "tokens"): 1.9e9,
        ("kvpool_credentials_expire_timestamp_seconds", "certificates"): 2e9,
        **{("kvpool_limit_usage_ratio", limit): 0.25 for limit in LIMITS},
    }


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


def test_metrics_under_vllms_names_are_the_same() -> None:
    world = busy_world()
    kept = BlockLifetimes(1, lambda _: 0)
    kept.lifetime.observe(3.0)
    text = scrape([(info_of(world), kept)], Observations(), with_vllm=True)
    samples = samples_of(text)
    of_model = frozenset({("model_name", "m")})
    assert samples["vllm:kv_cache_usage_perc", of_model] == info_of(world).usage
    assert samples["vllm:prefix_cache_queries_total", of_model] == 20
    assert samples["vllm:prefix_cache_hits_total", of_model] == 0
    assert samples["vllm:num_preemptions_total", of_model] == 0
    assert samples["vllm:kv_block_lifetime_seconds_sum", of_model] == 3.0
    assert ("vllm:kv_block_idle_before_evict_seconds_count", of_model) in samples
    assert ("vllm:kv_block_reuse_gap_seconds_count", of_model) in samples
    assert "vllm:" not in scrape([(info_of(world), kept)], Observations())


def test_help_texts_are_sentences_and_names_follow_the_conventions() -> None:
    for line in scrape([(info_of(busy_world()), None)], Observations()).splitlines():
        if line.startswith("# HELP"):
            _, _, name, text = line.split(" ", 3)
            assert text[0].isupper() or text[0].isdigit(), line
            assert text.endswith("."), line
            assert name.startswith("kvpool_"), line


def test_histogram_copies_do_not_change() -> None:
    histogram = Histogram((1.0, 2.0))
    copy = histogram.copy()
    histogram.observe(2.0)
    assert (histogram.counts, histogram.total, copy.counts, copy.total) == ([0, 1, 0], 2.0, [0, 0, 0], 0.0)


@pytest.mark.parametrize(
    "file", ["prometheus/rules.yml", "prometheus/rules_test.yml", "grafana/dashboards/kvpool.json"]
)
def test_rules_and_dashboard_use_exported_names(file: str) -> None:
    """tests/compose/test_rules_and_dashboard.py compares labels and values, too."""
    used = set(re.findall(r"\bkvpool_\w+", (ROOT / "deploy" / file).read_text()))
    assert len(used) > 20
    assert used <= exported_labels().keys()
