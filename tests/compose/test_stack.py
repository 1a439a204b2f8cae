"""The started stack: services are healthy, schedulers work, and Prometheus has the server's figures."""

import json
import math
import re
import time

import pytest
import yaml

from kvpool.client import PoolState, RankState
from kvpool.client.admin import AdminClient
from support.compose import DEPLOY, POOL, SCHEDULERS, Stack, eventually
from support.server import pool_config

DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvpool.json"


def expressions() -> list[str]:
    """Every expression of the dashboard, as Grafana sends it for all pools and a short time range.

    Without those of shards and credentials: the stack has no cluster, no tokens and no TLS.
    """
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    filled = [re.sub(r"\$(pool|instance)", ".*", text).replace("$__rate_interval", "1m") for text in targets]
    return [text for text in filled if not re.search("kvpool_(shard|credentials)_", text)]


def test_all_services_are_healthy_and_the_pool_is_ready(stack: Stack) -> None:
    stack.wait_healthy()
    pool = stack.wait_played_on()
    assert (pool.state, pool.config.num_blocks, pool.sessions) == (PoolState.POOL_STATE_READY, 1024, 2)
    assert [rank.state for rank in pool.ranks] == [RankState.RANK_STATE_READY, RankState.RANK_STATE_READY]


def test_prometheus_scrapes_all_and_evaluates_all_rules(stack: Stack) -> None:
    instances = {"server:9464", "worker-0:9465", "worker-1:9465"}
    eventually("all targets up", lambda: stack.prometheus.target_health() == dict.fromkeys(instances, "up"))
    eventually("all rules evaluated", lambda: all(rule["health"] == "ok" for rule in stack.prometheus.rules()))
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    assert len(stack.prometheus.rules()) == sum(len(group["rules"]) for group in groups)


def test_schedulers_in_containers_share_the_cache(stack: Stack) -> None:
    pool = eventually("evictions", lambda: pool if (pool := stack.pool()).evicted_blocks else None, 120)
    assert pool.prefix_cache.hits_tokens > pool.prefix_cache.queries_tokens / 2
    assert pool.prefix_cache.shared_hits_tokens > 0
    for scheduler in SCHEDULERS:
        assert f"a session on pool '{POOL}', epoch {pool.epoch}" in stack.logs(scheduler)


def test_every_expression_of_the_dashboard_returns_data(stack: Stack) -> None:
    pending = expressions()
    assert len(pending) > 50
    stack.client.create_pool(pool_config("two-tiers", num_host_blocks=100))  # the ranks' pool has no host memory
    end = time.monotonic() + 150  # rates over a minute need a minute, and sampled blocks must be evicted
    while pending and time.monotonic() < end:
        pending = [text for text in pending if all(math.isnan(sample.value) for sample in stack.prometheus.query(text))]
        time.sleep(1)
    with AdminClient(stack.address) as admin:
        admin.remove_pool("two-tiers")
    assert not pending, "\n".join(pending)


def test_prometheus_has_the_figures_of_the_server(stack: Stack) -> None:
    pool = stack.stop_schedulers()
    stack.wait_scraped()
    cache = pool.prefix_cache
    figures = {
        "kvpool_pool_blocks": pool.config.num_blocks - 1,
        "kvpool_pool_free_blocks": pool.free_blocks,
        "kvpool_pool_used_blocks": 0,
        "kvpool_pool_cached_blocks": pool.cached_blocks,
        "kvpool_pool_usage_ratio": 0,
        "kvpool_pool_epoch": pool.epoch,
        "kvpool_prefix_cache_recent_hit_ratio": pool.recent_hit_rate,
        "kvpool_prefix_cache_queried_tokens_total": cache.queries_tokens,
        "kvpool_prefix_cache_hit_tokens_total": cache.hits_tokens,
        "kvpool_prefix_cache_shared_hit_tokens_total": cache.shared_hits_tokens,
        "kvpool_evicted_blocks_total": pool.evicted_blocks,
        "kvpool_preemptions_total": pool.preemptions,
        "kvpool_sessions": 0,
    }
    assert {name: stack.prometheus.value(f'{name}{{pool="{POOL}"}}') for name in figures} == figures
    hit_rate = stack.prometheus.value("kvpool_prefix_cache_hit_tokens_total / kvpool_prefix_cache_queried_tokens_total")
    assert hit_rate == pytest.approx(cache.hits_tokens / cache.queries_tokens)
    assert pool.free_blocks == pool.config.num_blocks - 1
    stack.compose("start", *SCHEDULERS)
    stack.wait_played_on()
