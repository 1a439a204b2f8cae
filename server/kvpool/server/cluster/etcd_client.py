"""Calls to the members of an etcd cluster: which member is called, for how long, and with which token.

1. A read is repeated at the other members until its time limit. A write is sent at most once, so that it cannot be
   applied twice: it goes to another member only if it certainly was not sent, or was refused for its token.
2. Each call requires a leader, so a member that is cut off from the others fails it at once.
3. The revision of a linearizable answer is at least each revision that was known before the call. If it is not, etcd
   was restored from an older backup. From then on every call fails.

`proto/kvpool/etcd` holds the four calls, from etcd's own protos. Client libraries do not serve: aetcd takes one
address, has no TLS, never renews a token and hides revisions; etcd3 is not maintained; etcetra needs an older gRPC;
etcd3gw blocks.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Final, TypeVar

import grpc

from kvpool.etcd import kv_pb2, rpc_pb2, rpc_pb2_grpc
from kvpool.server.cluster.directory import DirectoryError, DirectoryRegressedError
from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.server.cluster.etcd_errors import EtcdUnavailableError, error_of, is_stale_token
from kvpool.wire.backoff import Backoff
from kvpool.wire.channels import CHANNEL_OPTIONS, ClientCredentials, TlsConfig

_Request = TypeVar("_Request", rpc_pb2.RangeRequest, rpc_pb2.TxnRequest)
_Response = TypeVar("_Response", rpc_pb2.RangeResponse, rpc_pb2.TxnResponse)
_Metadata = tuple[tuple[str, str], ...]

_REQUIRE_LEADER: Final = ("hasleader", "true")
_OPTIONS: Final = [
    *CHANNEL_OPTIONS,
    # An unanswered ping detects a dead connection of a watch. etcd refuses pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # its pings count, too
    ("grpc.enable_http_proxy", 0),
]


class _Endpoint:
    """A member of etcd and the connection to it."""

    def __init__(self, address: str, tls: TlsConfig | None) -> None:
        self.address = address
        self.channel = ClientCredentials(tls).aio_channel(address, _OPTIONS)
        self.kv: rpc_pb2_grpc.KVAsyncStub = rpc_pb2_grpc.KVStub(self.channel)
        self.watch: rpc_pb2_grpc.WatchAsyncStub = rpc_pb2_grpc.WatchStub(self.channel)
        self.auth: rpc_pb2_grpc.AuthAsyncStub = rpc_pb2_grpc.AuthStub(self.channel)

    async def connect(self, timeout_seconds: float) -> None:
        """Waits for a connection. Raises EtcdUnavailableError if there is none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                state = self.channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    if state is grpc.ChannelConnectivity.READY:
                        return
                    await self.channel.wait_for_state_change(state)
                    state = self.channel.get_state(try_to_connect=True)
        raise EtcdUnavailableError(f"etcd at {self.address}: it cannot be reached, or the TLS settings do not fit")


class EtcdClient:
    """An etcd cluster. Make it in the event loop that uses it.

    Args:
        config: How to reach it.
        call_timeout_seconds: Time limit of a call, with all its attempts.
        attempt_timeout_seconds: Time limit of one connection, authentication or request to one member.

    Raises:
        ValueError: A TLS file cannot be read; the message names it.
    """

    def __init__(self, config: EtcdConfig, call_timeout_seconds: float, attempt_timeout_seconds: float) -> None:
        self._config = config
        self._call_timeout_seconds = call_timeout_seconds
        self._attempt_timeout_seconds = attempt_timeout_seconds
        try:
            self._endpoints = [_Endpoint(address, config.tls) for address in config.endpoints]
        except ValueError as error:
            raise ValueError(f"cluster: {error}") from error
        self._preferred = 0
        self._token: str | None = None
        self._cluster_id = 0
        self._highest_revision = 0
        self._went_back = ""
        self.is_closed = False

    async def read(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """Reads keys.

        Raises:
            EtcdUnavailableError: No member answered within the time limit.
            DirectoryError: etcd refuses the call, or is another one.
        """
        return await self._call(lambda endpoint: endpoint.kv.Range, request, repeat=True)

    async def write(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """Makes a transaction.

        Raises:
            DirectoryError: The outcome is unknown, or etcd refuses the call.
        """
        return await self._call(lambda endpoint: endpoint.kv.Txn, request, repeat=False)

    async def changes(
        self, keys: rpc_pb2.RangeRequest, start_revision: int
    ) -> AsyncGenerator[Sequence[kv_pb2.Event], None]:
        """Yields the changes of keys from a revision on. Ends when the member ends the stream or is lost.

        Raises:
            DirectoryError: No member can be reached, or etcd refuses the call, or is another one.
        """
        endpoint = self._endpoints[self._preferred]
        metadata = await self._prepare(endpoint, _now() + self._call_timeout_seconds)
        with self._not_closed():
            call = endpoint.watch.Watch(metadata=metadata)
        create = rpc_pb2.WatchCreateRequest(
            key=keys.key, range_end=keys.range_end, start_revision=start_revision, fragment=True
        )
        try:
            with self._not_closed():
                async with asyncio.timeout(self._attempt_timeout_seconds):
                    await call.write(rpc_pb2.WatchRequest(create_request=create))
                    response = await call.read()
            while isinstance(response, rpc_pb2.WatchResponse) and not response.canceled:
                self._check(endpoint, response.header, 0)
                if response.events:
                    yield response.events
                with self._not_closed():
                    response = await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):  # write() of an ended call: invalid
            pass
        finally:
            call.cancel()
        self._avoid(endpoint)

    async def close(self) -> None:
        """Ends calls, with DirectoryError, and connections."""
        self.is_closed = True
        await asyncio.gather(*(endpoint.channel.close() for endpoint in self._endpoints))

    async def _call(
        self,
        method: Callable[[_Endpoint], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        *,
        repeat: bool,
    ) -> _Response:
        deadline = _now() + self._call_timeout_seconds
        failure = DirectoryError("etcd: no time for an attempt")
        backoff = Backoff(0.1, 0.5)
        for attempt in itertools.count(1):
            if _now() >= deadline:
                break
            endpoint = self._endpoints[self._preferred]
            try:
                metadata = await self._prepare(endpoint, deadline)
                known_revision = self._highest_revision
                timeout_seconds = self._attempt_seconds(deadline)
                with self._not_closed():
                    response = await method(endpoint)(request, timeout=timeout_seconds, metadata=metadata)
            except EtcdUnavailableError as error:
                failure = error
                self._avoid(endpoint)
            except grpc.aio.AioRpcError as error:
                failure = error_of(endpoint.address, error)
                if is_stale_token(error):
                    self._forget_token(metadata)
                else:
                    self._avoid(endpoint)
                    if not (repeat and isinstance(failure, EtcdUnavailableError)):
                        raise failure from error
            else:
                self._check(endpoint, response.header, known_revision)
                return response
            if attempt % len(self._endpoints) == 0:  # each member has failed once
                await asyncio.sleep(backoff.next())
        raise failure

    async def _prepare(self, endpoint: _Endpoint, deadline: float) -> _Metadata:
        """Connects and authenticates. Returns the metadata of a call, which has not been sent yet."""
        if self._went_back:
            raise DirectoryRegressedError(self._went_back)
        with self._not_closed():
            await endpoint.connect(self._attempt_seconds(deadline))
            if not self._config.user:
                return (_REQUIRE_LEADER,)
            token = self._token = self._token or await self._authenticate(endpoint, deadline)
        return (_REQUIRE_LEADER, ("token", token))

    async def _authenticate(self, endpoint: _Endpoint, deadline: float) -> str:
        path = self._config.password_file
        try:
            password = (await asyncio.to_thread(path.read_text)).strip() if path else ""
            request = rpc_pb2.AuthenticateRequest(name=self._config.user, password=password)
            response = await endpoint.auth.Authenticate(request, timeout=self._attempt_seconds(deadline))
        except (OSError, UnicodeDecodeError) as error:
            raise DirectoryError(f"password file of etcd's user: {path}: {error}") from error
        except grpc.aio.AioRpcError as error:
            raise error_of(endpoint.address, error) from error
        return response.token

    def _attempt_seconds(self, deadline: float) -> float:
        return min(self._attempt_timeout_seconds, max(deadline - _now(), 0.0))

    def _forget_token(self, metadata: _Metadata) -> None:
        if ("token", self._token) in metadata:  # another call may have renewed it already
            self._token = None

    def _avoid(self, endpoint: _Endpoint) -> None:
        """Starts the next call at another member."""
        if self._endpoints[self._preferred] is endpoint:
            self._preferred = (self._preferred + 1) % len(self._endpoints)

    def _check(self, endpoint: _Endpoint, header: rpc_pb2.ResponseHeader, known_revision: int) -> None:
        self._cluster_id = self._cluster_id or header.cluster_id
        if header.cluster_id != self._cluster_id:
            self._went_back = (
                f"etcd at {endpoint.address}: it belongs to cluster {header.cluster_id:x}, not {self._cluster_id:x} "
                "as before"
            )
        elif header.revision < known_revision:
            self._went_back = (
                f"etcd at {endpoint.address}: its revision went back from {known_revision} to {header.revision}; "
                "it was restored from an older backup"
            )
        if self._went_back:
            raise DirectoryRegressedError(self._went_back)
        self._highest_revision = max(self._highest_revision, header.revision)

    @contextlib.contextmanager
    def _not_closed(self) -> Iterator[None]:
        """Raises DirectoryError in place of what gRPC raises if the channel is closed meanwhile."""
        try:
            yield
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if not self.is_closed or (task and task.cancelling()):
                raise
            raise DirectoryError("the directory was closed") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
