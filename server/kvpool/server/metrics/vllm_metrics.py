"""The same figures under the names that vLLM's dashboards use, with a pool as a model.

vLLM's figures are of one engine; these are of all sessions of the pool. Names and meaning follow vLLM's page on the
design of its metrics.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import Metric

from kvpool.server.metrics.pool_metrics import BLOCK_HISTOGRAMS, PoolSample
from kvpool.v1.pool_pb2 import PoolInfo
from kvpool.wire.metric_families import Row, families, histogram_family

_LABELS: Final = ("model_name",)

_POOL: Final[dict[str, Row[PoolInfo]]] = {
    "vllm:kv_cache_usage_perc": Row("KV-cache usage. 1 means 100 percent usage.", "usage"),
    "vllm:prefix_cache_queries_total": Row(
        "Prefix cache queries, in terms of number of queried tokens.", "prefix_cache.queries_tokens"
    ),
    "vllm:prefix_cache_hits_total": Row(
        "Prefix cache hits, in terms of number of cached tokens.", "prefix_cache.hits_tokens"
    ),
    "vllm:num_preemptions_total": Row("Cumulative number of preemptions.", "preemptions"),
}


def vllm_metrics(pools: Sequence[PoolSample]) -> Iterator[Metric]:
    """Makes the metric families, each with the samples of all pools."""
    yield from families(_POOL, _LABELS, [((pool.info.config.name,), pool.info) for pool in pools])
    for name, (text, _) in BLOCK_HISTOGRAMS.items():
        samples = [((pool.info.config.name,), pool.histograms[name]) for pool in pools]
        yield histogram_family(f"vllm:kv_{name.removeprefix('kvpool_')}", text, _LABELS, samples)
