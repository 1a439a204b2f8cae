"""Reads the metrics of a server over HTTP."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from support.waiting import DEADLINE_SECONDS


def scrape(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Returns the samples of /metrics on a port of this host, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_SECONDS) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }
