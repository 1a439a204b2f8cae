"""Makes Prometheus metric families from tables of metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import Generic, TypeAlias, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from kvpool.core.statistics import Histogram

_SourceT = TypeVar("_SourceT")
Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row(Generic[_SourceT]):
    """A metric of a table; the key of the table is its name.

    Attributes:
        text: The help text.
        read: The value of a source, for example of a pool: the path of an attribute, or a function that returns it.
    """

    text: str
    read: str | Callable[[_SourceT], float]


def families(
    table: Mapping[str, Row[_SourceT]], labels: Labels, sources: Sequence[tuple[Labels, _SourceT]]
) -> Iterator[Metric]:
    """Makes the families of a table. Each has one sample per source, with the values of its labels."""
    for name, row in table.items():
        read = attrgetter(row.read) if isinstance(row.read, str) else row.read
        yield family(name, row.text, labels, [(values, read(source)) for values, source in sources])


def family(name: str, text: str, labels: Labels, samples: Sequence[tuple[Labels, float]]) -> Metric:
    """Makes a counter if the name ends in _total, else a gauge."""
    made: GaugeMetricFamily | CounterMetricFamily
    if name.endswith("_total"):
        made = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
    else:
        made = GaugeMetricFamily(name, text, labels=labels)
    for values, sample in samples:
        made.add_metric(values, sample)
    return made


def histogram_family(name: str, text: str, labels: Labels, samples: Sequence[tuple[Labels, Histogram]]) -> Metric:
    """Makes a histogram with cumulative buckets."""
    made = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in samples:
        bounds = map(floatToGoString, (*histogram.bounds, inf))
        made.add_metric(values, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)
    return made
