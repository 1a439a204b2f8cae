"""Settings of the publisher: refused values, and the endpoint of each pool."""

from typing import Any

import pytest

from kvpool.core.ids import PoolName
from kvpool.server.events import config
from kvpool.server.events.config import EventsConfig, is_bound, numbered


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoint": "udp://*:1"}, "events_endpoint: 'udp://.*needs tcp"),
        ({"endpoint": "tcp://*"}, "events_endpoint"),
        ({"endpoint": "tcp://*:99999"}, "events_endpoint"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, r"events_endpoint: .* use tcp://\*:5557"),
        ({"endpoint": "inproc://x"}, "events_endpoint"),
        ({"endpoint": "ipc://"}, "events_endpoint"),
        ({"replay_endpoint": "tcp://*:5558"}, "events_replay_endpoint: needs events_endpoint"),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"}, "must differ"),
        ({"topic": "kv@{pod}"}, r"events_topic: .* only \{pool\} and \{host\}"),
        ({"topic": "kv@{"}, "events_topic"),
        ({"topic": "{}"}, "events_topic"),
        ({"buffer_batches": 0}, "events_buffer_batches: 0 is not in"),
        ({"heartbeat_seconds": 0.01}, "events_heartbeat_seconds: 0.01"),
        ({"heartbeat_seconds": float("nan")}, "events_heartbeat_seconds"),
        ({"pools": ("a", "a")}, "events_pool: a pool is named twice"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EventsConfig(**settings)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_PACKAGES", {"zmq_of_tomorrow": "pyzmq"})
    EventsConfig()
    with pytest.raises(ValueError, match="needs pyzmq: install kvpool with its extra 'events'"):
        EventsConfig("tcp://*:5557")


@pytest.mark.parametrize(
    ("endpoint", "bound", "third"),
    [
        ("tcp://*:5557", True, "tcp://*:5559"),
        ("tcp://[::]:5557", True, "tcp://[::]:5559"),
        ("tcp://127.0.0.1:*", True, "tcp://127.0.0.1:*"),
        ("tcp://*:0", True, "tcp://*:0"),
        ("ipc:///run/kv", True, "ipc:///run/kv.2"),
        ("tcp://indexer:5557", False, "tcp://indexer:5559"),
    ],
)
def test_endpoints_of_further_pools(endpoint: str, bound: bool, third: str) -> None:  # noqa: FBT001 - a case's
    assert is_bound(endpoint) is bound
    assert numbered(endpoint, 0) == endpoint
    assert numbered(endpoint, 2) == third


def test_named_pools_have_fixed_endpoints() -> None:
    a, b, c = map(PoolName, "abc")
    named = EventsConfig(pools=("b", "a"))
    assert [named.number_of(pool, 0) for pool in (a, b, c)] == [1, 0, None]
    assert EventsConfig().number_of(c, 3) == 3


def test_the_default_topic_has_the_pool_as_pod_and_model() -> None:
    assert EventsConfig().topic_of(PoolName("org/llama")) == "kv@org/llama@org/llama"
