"""Addresses at which something listens, or nothing does, for as long as a test needs them."""

import contextlib
import socket
from collections.abc import Iterator

from kvpool.server.cluster.directory import Member, MemberId, ShardRecord


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """An address that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield _address_of(listener)


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """An address that refuses connections. No other process gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield _address_of(bound)


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """An address that does not answer, as that of a lost machine: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex(listener.getsockname())
        yield _address_of(listener)


def record_at(*addresses: str, zone: str = "", term: int = 1) -> ShardRecord:
    """A record with a member at each address; the first one is the primary, and has the last id."""
    ids = [MemberId(f"m{len(addresses) - number}") for number in range(len(addresses))]
    members = [Member(member_id, (address,), "h:2", zone) for member_id, address in zip(ids, addresses, strict=True)]
    return ShardRecord(term, ids[0], tuple(sorted(members, key=lambda member: member.member_id)), f"change-{term}")


def _address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()
    return f"{host}:{port}"
