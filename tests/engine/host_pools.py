"""Pools with host memory, for schedulers of the tests."""

from dataclasses import replace

import pytest

from kvpool.client import Client
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.client.vllm import attach
from kvpool.client.vllm.pool_config import pool_config


def give_host_memory(
    monkeypatch: pytest.MonkeyPatch, num_host_blocks: int, service: EmbeddedTransport | None = None
) -> None:
    """Has schedulers create pools with host memory; on a service in this process, if one is given."""
    monkeypatch.setattr(
        attach, "pool_config", lambda *given: replace(pool_config(*given), num_host_blocks=num_host_blocks)
    )
    if service:
        monkeypatch.setattr(attach, "connect", lambda *_, **__: Client(service))
