"""The maximum number of connections that follows from the limit of open files."""

import resource

import pytest

from kvpool.server.limits.connections import max_connections

TCP, UNIX = "127.0.0.1:0", "unix:/s"


@pytest.mark.parametrize(
    ("limit", "requested", "addresses", "expected"),
    [
        (256, 0, [TCP], 64),
        (256, 0, [TCP, UNIX], 25),
        (256, 64, [TCP], 64),
        (256, 10, [TCP, UNIX], 10),
        (130, 0, [TCP], 1),
        (2**20, 0, [TCP, UNIX], 8192),
        (2**20, 100_000, [TCP], 100_000),
        (resource.RLIM_INFINITY, 0, [TCP], 8192),
        (256, 0, ["unknown.invalid:50051"], 64),
    ],
)
def test_connections_fit(
    limit: int, requested: int, addresses: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert max_connections(requested, addresses) == expected


@pytest.mark.parametrize(
    ("limit", "requested", "addresses", "needed"),
    [(256, 65, [TCP], 258), (256, 26, [TCP, UNIX], 258), (128, 0, [TCP], 130)],
)
def test_connections_that_do_not_fit_are_refused(
    limit: int, requested: int, addresses: list[str], needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(OSError, match=f"max_connections: .* need {needed} file descriptors; the limit is {limit}"):
        max_connections(requested, addresses)
