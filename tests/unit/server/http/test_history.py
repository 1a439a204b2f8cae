"""Samples of pools over the last hour."""

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.server.http.history import KEPT_SAMPLES, History
from support.core import admit, config


def test_samples_become_rates_and_ratios_of_their_intervals() -> None:
    pool, history = KVCacheManager(config(20)), History()
    history.record([pool], 1000.0)
    pool.stats.queries_tokens, pool.stats.hits_tokens, pool.blocks.num_evicted = 100, 25, 7
    admit(pool, "aaaa", 16)
    pool.stats.queries_tokens, pool.stats.hits_tokens = 100, 25
    assert pool.hit_curve
    pool.hit_curve.found_tokens[:] = [5, 12, 30, 60, 9]
    history.record([pool], 1010.0)
    history.record([pool], 1020.0)
    assert history.of(pool.config.name) == {
        "pool": "m",
        "times_seconds": [1010, 1020],
        "hit_ratios": [0.25, None],
        "evicted_blocks": [7, 0],
        "used_blocks": [4, 4],
        "hit_ratios_by_size": [
            {"size": 0.5, "hit_ratio": 0.13},
            {"size": 1.0, "hit_ratio": 0.25},
            {"size": 2.0, "hit_ratio": 0.55},
            {"size": 4.0, "hit_ratio": 1.0},
        ],
    }


def test_an_hour_is_kept_and_removed_pools_are_not() -> None:
    pool, history = KVCacheManager(config(20)), History()
    for i in range(2 * KEPT_SAMPLES):
        history.record([pool], 10.0 * i)
    kept = history.of(pool.config.name)
    assert len(kept["times_seconds"]) == KEPT_SAMPLES - 1
    assert kept["times_seconds"][-1] - kept["times_seconds"][0] == 3590
    history.record([], 0.0)
    assert history.of(pool.config.name)["times_seconds"] == []
    assert history.of(pool.config.name)["hit_ratios_by_size"] == []


def test_samples_begin_again_with_another_pool_of_the_same_name() -> None:
    first, second, history = KVCacheManager(config(20)), KVCacheManager(config(20)), History()
    first.stats.queries_tokens = 100
    history.record([first], 0.0)
    history.record([first], 10.0)
    history.record([second], 20.0)
    assert history.of(second.config.name)["times_seconds"] == []
