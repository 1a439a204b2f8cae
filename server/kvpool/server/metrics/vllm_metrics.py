"""The same figures under the names that vLLM's dashboards use, with a pool as a model.

vLLM's figures are of one engine; these are of all sessions of the pool. Names and meaning follow vLLM's page on the
design of its metrics.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import Metric

from kvpool.core.statistics import Histogram
from kvpool.server.metrics.pool_metrics import HISTOGRAMS, PoolSample, family, histogram_family

_LABELS: Final = ("model_name",)


def vllm_metrics(pools: Sequence[PoolSample]) -> Iterator[Metric]:
    """Makes the metric families, each with the samples of all pools."""
    infos = [sample.info for sample in pools]
    yield family(
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        _LABELS,
        [((info.config.name,), info.usage) for info in infos],
    )
    yield family(
        "vllm:prefix_cache_queries_total",
        "Prefix cache queries, in terms of number of queried tokens.",
        _LABELS,
        [((info.config.name,), info.prefix_cache.queries_tokens) for info in infos],
    )
    yield family(
        "vllm:prefix_cache_hits_total",
        "Prefix cache hits, in terms of number of cached tokens.",
        _LABELS,
        [((info.config.name,), info.prefix_cache.hits_tokens) for info in infos],
    )
    yield family(
        "vllm:num_preemptions_total",
        "Cumulative number of preemptions.",
        _LABELS,
        [((info.config.name,), info.preemptions) for info in infos],
    )
    for name, text, bounds, read in HISTOGRAMS:
        if name.startswith("kvpool_block_"):
            samples = [((p.info.config.name,), read(p.measures) or Histogram(bounds)) for p in pools]
            yield histogram_family(f"vllm:kv_{name.removeprefix('kvpool_')}", text, _LABELS, samples)
