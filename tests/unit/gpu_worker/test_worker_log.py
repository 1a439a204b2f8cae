"""What a rank's log says of its pool."""

import logging

import pytest

from kvpool.core.ranks.messages import PoolState, PoolStatus, RankGroupOptions, Ready
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.worker_log import WorkerLog


def test_the_log_reports_a_degraded_pool_while_a_rank_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    log = WorkerLog(WorkerSettings("host:1", "m", rank=1, world_size=2, options=RankGroupOptions(64), device="cpu"))
    with caplog.at_level(logging.INFO, "kvpool.worker"):
        log.received(PoolStatus(PoolState.DEGRADED, 2, ()))  # all are back, and this one has yet to allocate
        log.received(Ready(2, 100, 64))
        assert caplog.records == []
        log.received(PoolStatus(PoolState.DEGRADED, 2, (0,)))
        log.received(PoolStatus(PoolState.DEGRADED, 2, (0,), 7))
        log.received(PoolStatus(PoolState.DEGRADED, 2, ()))
        log.received(Ready(2, 100, 64))
    assert [record.message for record in caplog.records] == ["pool degraded", "pool resumed"]
    assert vars(caplog.records[0])["absent_ranks"] == [0]
