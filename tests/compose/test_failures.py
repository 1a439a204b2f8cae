"""Killed, disconnected or restarted services recover by themselves or by a successor, and no block is lost."""

import pytest

from kvpool.client import PoolState, RankState
from support.compose import POOL, PROJECT, SCHEDULERS, Inject, Stack, docker, eventually

ENDED = f'kvpool_sessions_ended_total{{pool="{POOL}",reason="%s"}}'
RANKS = f'kvpool_ranks{{pool="{POOL}",state=~"silent|lost"}}'


def missing_ranks(stack: Stack) -> float:
    return stack.prometheus.value(f"sum({RANKS})") or 0.0


def test_a_killed_worker_suspends_the_pool_and_its_successor_begins_a_new_epoch(stack: Stack, inject: Inject) -> None:
    epoch = stack.wait_ready().epoch
    stack.wait_scraped()
    suspended = stack.prometheus.value("kvpool_pool_suspensions_total") or 0.0
    ended = stack.prometheus.value(ENDED % "epoch_passed") or 0.0
    failure = inject("worker-1 killed, started again")
    stack.compose("kill", "worker-1")
    pool = stack.wait_state(PoolState.POOL_STATE_DEGRADED)
    failure.noticed()
    assert pool.ranks[1].state == RankState.RANK_STATE_LOST
    eventually("the metrics to miss it", lambda: missing_ranks(stack) == 1)
    failure.repaired()
    stack.compose("start", "worker-1")
    pool = stack.wait_ready()
    stack.wait_played_on()
    failure.recovered(f"epoch {epoch} -> {pool.epoch}, the cache")
    assert pool.epoch > epoch
    eventually("the metrics", lambda: stack.prometheus.value("kvpool_pool_epoch") == pool.epoch)
    assert stack.prometheus.increase_since("kvpool_pool_suspensions_total", suspended) >= 1
    assert stack.prometheus.increase_since(ENDED % "epoch_passed", ended) >= 2
    stack.assert_no_block_lost()


@pytest.mark.complete
def test_a_missing_worker_fires_the_alert(stack: Stack, inject: Inject) -> None:
    """Schedulers may have reached their deadline by then, and closed their sessions."""
    stack.wait_ready()
    failure = inject("worker-1 killed, started again after the alert")
    stack.compose("kill", "worker-1")
    eventually("the alert", lambda: stack.prometheus.alert_states().get("KvpoolRankLost") == "firing")
    failure.noticed()
    failure.repaired()
    stack.compose("start", "worker-1")
    pool = stack.wait_ready()
    stack.wait_played_on()
    failure.recovered(f"epoch {pool.epoch}, the cache")
    eventually("the alert to end", lambda: "KvpoolRankLost" not in stack.prometheus.alert_states())
    stack.assert_no_block_lost()


@pytest.mark.complete
def test_a_worker_disconnected_within_the_grace_time_costs_nothing(stack: Stack, inject: Inject) -> None:
    before = stack.wait_ready()
    stack.wait_scraped()
    opened = stack.prometheus.value("kvpool_sessions_opened_total")
    worker, network = stack.container("worker-1"), f"{PROJECT}_default"
    failure = inject("worker-1 cut off by docker network disconnect")
    docker("network", "disconnect", network, worker)
    pool = stack.wait_state(PoolState.POOL_STATE_DEGRADED)
    failure.noticed()
    assert pool.ranks[1].state in (RankState.RANK_STATE_SILENT, RankState.RANK_STATE_LOST)
    eventually("the metrics to miss it", lambda: missing_ranks(stack) == 1)
    failure.repaired()
    docker("network", "connect", "--alias", "worker-1", network, worker)
    pool = stack.wait_ready()
    stack.wait_played_on()
    failure.recovered(f"nothing: still epoch {pool.epoch}")
    assert pool.epoch == before.epoch
    assert pool.cached_blocks > 0
    eventually("the metrics to find it", lambda: missing_ranks(stack) == 0)
    stack.wait_scraped()
    assert stack.prometheus.value("kvpool_sessions_opened_total") == opened, "schedulers kept their sessions"
    eventually("its own to be back", lambda: stack.prometheus.target_health()["worker-1:9465"] == "up")
    stack.assert_no_block_lost()


@pytest.mark.complete
def test_blocks_of_a_killed_scheduler_are_free_after_its_lease(stack: Stack, inject: Inject) -> None:
    stack.compose("stop", "scheduler-1")
    eventually("blocks in use", lambda: (pool := stack.pool()).sessions == 1 and pool.usage > 0)
    stack.wait_scraped()
    expired = stack.prometheus.value(ENDED % "lease_expired") or 0.0
    failure = inject("scheduler-0 killed while it held all that was in use")
    stack.compose("kill", "scheduler-0")
    failure.repaired()
    pool = eventually("all blocks free", lambda: pool if not (pool := stack.pool()).usage else None)
    failure.recovered("its session; the cache stays")
    assert pool.free_blocks == pool.config.num_blocks - 1
    assert (pool.sessions, pool.requests) == (0, 0)
    assert pool.cached_blocks > 0
    eventually("the metrics", lambda: stack.prometheus.increase_since(ENDED % "lease_expired", expired) == 1)
    eventually("the alert", lambda: stack.prometheus.alert_states().get("KvpoolLeasesExpired") == "firing")
    stack.compose("start", *SCHEDULERS)
    stack.wait_played_on()
    stack.assert_no_block_lost()


@pytest.mark.complete
def test_a_rolling_restart_of_all_ends_in_a_ready_pool(stack: Stack, inject: Inject) -> None:
    epochs = [stack.wait_ready().epoch]
    for service in ("server", "worker-0", "worker-1", *SCHEDULERS):
        failure = inject(f"rolling restart: {service}")
        before = stack.container(service)
        stack.compose("up", "-d", "--no-build", "--no-deps", "--force-recreate", service)
        assert stack.container(service) != before
        if not service.startswith("scheduler"):
            eventually(f"{service} healthy", lambda service=service: stack.health(service) == "healthy")  # type: ignore[misc]
        epochs.append(stack.wait_ready().epoch)
        stack.wait_played_on()
        failure.recovered(f"epoch {epochs[-2]} -> {epochs[-1]}" if epochs[-1] > epochs[-2] else "its session")
    assert epochs == sorted(epochs)
    assert epochs[-3] == epochs[-1], "schedulers cost no epoch"
    stack.wait_scraped()
    assert stack.prometheus.value("kvpool_pool_epoch") == epochs[-1]
    assert stack.prometheus.value(f'kvpool_pool_state{{pool="{POOL}",state="ready"}}') == 1
    stack.assert_no_block_lost()


def test_a_killed_server_recovers_its_state(stack: Stack, inject: Inject) -> None:
    before = stack.wait_played_on()
    failure = inject("server killed, started again")
    stack.compose("kill", "server")
    eventually("Prometheus to miss it", lambda: stack.prometheus.value('up{job="kvpool-server"}') == 0)
    failure.noticed()
    failure.repaired()
    stack.compose("start", "server")
    pool = stack.wait_ready()
    stack.wait_played_on()
    failure.recovered(f"nothing: still epoch {pool.epoch}")
    assert pool.epoch == before.epoch
    assert pool.activity.sessions_opened == before.activity.sessions_opened, "schedulers kept their sessions"
    assert pool.cached_blocks > 0
    assert [rank.pid for rank in pool.ranks] == [rank.pid for rank in before.ranks]
    eventually("Prometheus to find it", lambda: stack.prometheus.value("kvpool_journal_up") == 1)
    stack.assert_no_block_lost()
