"""Attacks by connections: to all ports of a server, and to a lender's socket."""

import contextlib
import socket
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Final

import grpc

from attacks.attack import Assault, refusal
from attacks.lending import LendingTarget
from attacks.shards import ShardTarget
from attacks.target import TENANTS, Target
from kvpool.client import UnauthenticatedError
from kvpool.server.cluster.directory import Member, MemberId
from kvpool.server.cluster.messages import Hello, core_fingerprint, hello
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc
from kvpool.wire.frames import encode_frame
from kvpool.wire.link import MAX_GREETING_BYTES, Kind
from support.auth import secret_of
from support.lending import lending_hello
from support.waiting import DEADLINE_SECONDS

_PEERS: Final = 400
_STRANGERS: Final = 256
TLS_GREETING: Final = b"\x16\x03\x01\x02\x00\x01"
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SCRAPES: Final = [
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: %b\r\nAccept-Encoding: %b\r\n\r\n" % (accept, encoding)
    for accept in (b"text/plain", b"application/openmetrics-text")
    for encoding in (b"identity", b"gzip")
]
"""A scrape in each format."""


def flood_connections(assault: Assault) -> None:
    """Opens connections that say nothing, half a TLS greeting, or TLS and then nothing, and opens closed ones again."""
    _flood_port(assault, assault.target.port, b"", TLS_GREETING, _HTTP2_PREFACE)


def flood_metrics(assault: Assault) -> None:
    """Opens connections to the metrics port that say nothing, half a request, or scrape in a format; reads nothing."""
    _flood_port(assault, assault.target.metrics_port, b"", _SCRAPES[0][:15], *_SCRAPES)


def scrape(target: Target) -> None:
    """Reads all pages of the metrics port."""
    for page in ("metrics", "healthz", "readyz"):
        url = f"http://127.0.0.1:{target.metrics_port}/{page}"
        with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
            assert answer.read(), page


def flood_lender(assault: Assault) -> None:
    """Opens connections to a lender's socket that say nothing, half an introduction, or one without the token."""
    assert isinstance(assault.target, LendingTarget)
    path = assault.target.lender.address.removeprefix("unix:")
    hello = lending_hello()
    greetings = b"", hello[:5], hello
    flood(assault, lambda number: connected(socket.AF_UNIX, path, greetings[number % len(greetings)]))


def flood_replication(assault: Assault) -> None:
    """Opens connections to the port of standbys: before TLS, or with TLS and a hello that is no standby's."""
    target = assault.target
    assert isinstance(target, ShardTarget)
    tls = ssl.create_default_context(cafile=target.authority.path)
    hellos = _bad_hellos(target)

    def connect(number: int) -> socket.socket:
        if number % 4:
            return connected(socket.AF_INET, ("127.0.0.1", target.replication_port), (b"", TLS_GREETING)[number % 2])
        peer = connected(socket.AF_INET, ("127.0.0.1", target.replication_port), b"")
        peer.settimeout(1)
        with contextlib.suppress(OSError):
            peer = tls.wrap_socket(peer, server_hostname="localhost")
            peer.sendall(hellos[number // 4 % len(hellos)])
        return peer

    flood(assault, connect)


def _bad_hellos(target: ShardTarget) -> list[bytes]:
    member = Member(MemberId("attacker"), ("127.0.0.1:1",), "127.0.0.1:2")
    token = secret_of("standby")
    good = Hello(target.shard, core_fingerprint(), member, target.term(), 0, 0)
    members = [
        replace(member, addresses=()),
        replace(member, member_id=MemberId("../")),
        replace(member, member_id=MemberId("")),
        replace(member, replication_address="\0"),
        replace(member, addresses=("127.0.0.1:1",) * 500),
    ]
    hellos = [replace(good, member=each) for each in members]
    hellos += [replace(good, term=0), replace(good, resumed_term=-1, resumed_position=-1)]
    garbage = [b"", *(encode_frame(Kind.HELLO, bytes(size)) for size in (0, 100, MAX_GREETING_BYTES, 2**20))]
    return [*(hello(token, each) for each in hellos), hello("", good), *garbage]


def call_without_token(assault: Assault) -> None:
    """Holds 256 connections without a token; opens one after the other again, and makes a call that is refused."""
    request = allocator_pb2.GetPoolRequest(pool_name=TENANTS[0])
    with contextlib.ExitStack() as closing:
        strangers: list[grpc.Channel] = []
        closing.callback(lambda: [stranger.close() for stranger in strangers])
        while not assault.is_over.is_set():
            strangers.append(assault.target.channel(None))
            stub = allocator_pb2_grpc.AllocatorServiceStub(strangers[-1])
            error = refusal(partial(stub.GetPool, request, timeout=DEADLINE_SECONDS))
            assert isinstance(error, UnauthenticatedError), error
            if len(strangers) > _STRANGERS:
                strangers.pop(0).close()


def connect(target: Target) -> None:
    """Makes a call over a new connection."""
    with target.connect(TENANTS[1], deadline_seconds=5) as client:
        client.get_pool(TENANTS[0])


def _flood_port(assault: Assault, port: int, *greetings: bytes) -> None:
    address = ("127.0.0.1", port)
    flood(assault, lambda number: connected(socket.AF_INET, address, greetings[number % len(greetings)]))


def flood(assault: Assault, connect: Callable[[int], socket.socket]) -> None:
    """Opens numbered connections one after the other, and closes the oldest of more than 400."""
    peers: list[socket.socket] = []
    for number in count(1):
        if assault.is_over.wait(0.001):
            break
        peers.append(connect(number))
        if len(peers) > _PEERS:
            peers.pop(0).close()
    for peer in peers:
        peer.close()


def connected(family: socket.AddressFamily, address: str | tuple[str, int], greeting: bytes) -> socket.socket:
    """A connection, if there is one in time, on which the greeting was sent if it was taken in time."""
    peer = socket.socket(family)
    peer.settimeout(0)
    with contextlib.suppress(OSError):
        peer.connect_ex(address)
        peer.settimeout(0.05)
        peer.sendall(greeting)
    return peer
