"""Benchmarks of single parts: ranks, metrics, events, journal, fairness, devices. Each prints JSON."""
