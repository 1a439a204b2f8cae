"""Settings of a server of a shard."""

from typing import Any

import pytest

from kvpool.server.cluster.config import ClusterConfig

GOOD: dict[str, Any] = {"url": "etcd://h:1/c", "replication_listen": "127.0.0.1:0"}


def test_a_server_alone_needs_no_settings() -> None:
    assert not ClusterConfig().url
    ClusterConfig(min_in_sync=0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("advertise", [("h:1", "[::1]:2"), ()]),
        ("replication_advertise", ["h:1", ""]),
        ("min_in_sync", [1, 8]),
        ("standbys", [1, 7]),
        ("takeover_seconds", [0.1, 60]),
        ("standby_timeout_seconds", [0.1, 60]),
        ("confirm_seconds", [0.1, 60]),
        ("replication_log_bytes", [2**20, 2**34]),
    ],
)
def test_the_bounds_are_accepted(name: str, values: list[object]) -> None:
    for value in values:
        assert getattr(ClusterConfig(**{**GOOD, name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("replication_listen", ["", "h", "unix:/s", ":1", "h:99999"]),
        ("advertise", [("h",), ("h:1", "unix:/s")]),
        ("replication_advertise", ["h", "h:1,h:2"]),
        ("min_in_sync", [0, 9]),
        ("standbys", [0, 8, -1]),
        ("takeover_seconds", [0, 0.05, 61, float("nan")]),
        ("standby_timeout_seconds", [-1, 61]),
        ("confirm_seconds", [0, 61, float("inf")]),
        ("replication_log_bytes", [2**20 - 1, 2**34 + 1]),
    ],
)
def test_anything_else_is_refused_by_name(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}: "):
            ClusterConfig(**{**GOOD, name: value})


def test_a_shard_should_have_the_standbys_without_which_nothing_is_confirmed() -> None:
    assert ClusterConfig(**GOOD).wanted_standbys == 1
    assert ClusterConfig(**GOOD, standbys=3).wanted_standbys == 3
    assert ClusterConfig(**GOOD, standbys=1, min_in_sync=4).wanted_standbys == 3
