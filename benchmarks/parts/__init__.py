"""Benchmarks of single parts: ranks, metrics, events, journal, fairness, devices. Each prints JSON."""

import os

os.environ["KVPOOL_FRESH_PROCESSES"] = "1"  # a fork has the memory of all that its parent imported
