"""The connection of a client to the primary of a shard, and the errors of its calls."""

import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Final, Generic, Protocol, TypeVar

import grpc

from kvpool.client.retries import Retries
from kvpool.core.errors import KvpoolError, UnavailableError, WrongStateError
from kvpool.v1 import directory_pb2
from kvpool.wire.address import parse_seeds
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import DeadlineError, from_rpc_error
from kvpool.wire.seeds import AddressBook, PrimarySearch

REPLACED: Final = "CANCELLED"
"""Reason of the error of a call that was cancelled because its server is not the primary any more."""


class Link(Protocol):
    """A connection to one server."""

    @property
    def address(self) -> str:
        """Address of the server."""

    async def close(self) -> None:
        """Ends the connection and cancels its calls."""


_LinkT = TypeVar("_LinkT", bound=Link)
_T = TypeVar("_T")


class PrimaryConnection(Generic[_LinkT]):
    """The connection to the primary, replaced when another server becomes the primary.

    It belongs to the process that made it: a forked process has none of its threads. Threads may share it. Its
    coroutines suspend only where those of the link do.
    """

    def __init__(self, address: str, access: ClientCredentials, open_link: Callable[[str], _LinkT]) -> None:
        """Opens a link to the first address.

        Args:
            address: One address, or several separated by commas.
            access: Credentials for all of them.
            open_link: Makes a link, which connects at its first call. Raises ValueError if the token may not be sent to
                the address, or a file cannot be read.

        Raises:
            ValueError: An address is malformed, or see `open_link`.
        """
        seeds = parse_seeds(address)
        for seed in seeds[1:]:
            access.check(seed)
        self._book = AddressBook(seeds)
        self._open_link = open_link
        self._token_source = access.token_source
        self._lock = threading.Lock()
        self._link = open_link(seeds[0])
        self._observed: _LinkT | None = None
        self._num_failed_observations = 0
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def target(self) -> str:
        """Address of the server to call."""
        return self._book.target

    @property
    def has_others(self) -> bool:
        """Whether more than one address is known."""
        return len(self._book.candidates) > 1

    def check(self) -> None:
        """Raises WrongStateError unless calls can be made.

        Raises:
            WrongStateError: This process was forked from the one that connected (FORKED), or it was closed (CLOSED).
        """
        if self._pid != os.getpid():
            message = "this process was forked after it connected: call connect() in it, and open a session of its own"
            raise WrongStateError("FORKED", message)
        if self._is_closed:
            raise closed_error()

    def error_of(self, error: grpc.RpcError, link: Link) -> KvpoolError:
        """Decodes the error of a call. Names the server that cannot be reached, or the token that it refuses."""
        if error.code() is grpc.StatusCode.CANCELLED and self.is_replaced(link):
            return replaced_error()
        return from_rpc_error(error, link.address, self._token_source)

    def is_replaced(self, link: Link) -> bool:
        """Whether another link has replaced this one."""
        return link is not self._link

    async def link(self) -> _LinkT:
        """The link to the target. A new one replaces the one before, which cancels the calls on it.

        Raises:
            UnavailableError: A file of the credentials cannot be read, or the token may not be sent there (NO_ACCESS).
            WrongStateError: See `check`.
        """
        while self._link.address != self._book.target:
            with self._lock:
                self.check()
                target = self._book.target
                if self._link.address == target:
                    break
                try:
                    opened = self._open_link(target)
                except ValueError as error:
                    raise UnavailableError("NO_ACCESS", str(error)) from None
                old, self._link = self._link, opened
                observed = self._observed if self._observed and self._observed.address == target else None
            await old.close()
            if observed:  # another server has to be observed from now on
                await observed.close()
        return self._link

    async def call(
        self,
        attempt: Callable[[_LinkT, float], Awaitable[_T]],
        deadline_seconds: float,
        sleep: Callable[[float], Awaitable[object]],
        *,
        is_any: bool = False,
        try_seconds: float = inf,
    ) -> _T:
        """Calls the primary until it answers. Searches for it, and waits, only after the first attempt has failed.

        Args:
            attempt: Makes one call over a link, within the seconds that it is given. It may be repeated.
            deadline_seconds: Time limit of all attempts together.
            sleep: Waits between two rounds of the search.
            is_any: Whether any server can answer the call, also one that is not the primary.
            try_seconds: Time limit of the first attempt. See `call_round` for the others.

        Raises:
            KvpoolError: See `Retries.pause_seconds`.
        """
        started_seconds, limit_seconds = time.monotonic(), min(deadline_seconds, try_seconds)
        link, address = self._link, self._book.target
        try:
            if link.address != address:
                link = await self.link()
                address = link.address
            return await attempt(link, limit_seconds)
        except KvpoolError as error:
            failed: tuple[str, KvpoolError] | None = (address, error)
            was_cut = limit_seconds < deadline_seconds and isinstance(error, DeadlineError)
        search, retries = self.new_search(is_any=is_any), Retries(started_seconds, deadline_seconds)
        while True:
            try:
                return await self.call_round(attempt, search, retries.left_seconds, try_seconds, failed)
            except KvpoolError as error:
                pause_seconds = retries.pause_seconds(error, was_cut=was_cut)
            await sleep(pause_seconds)
            failed, was_cut = None, False

    async def call_round(
        self,
        attempt: Callable[[_LinkT, float], Awaitable[_T]],
        search: PrimarySearch,
        timeout_seconds: float,
        try_seconds: float = inf,
        failed: tuple[str, KvpoolError] | None = None,
    ) -> _T:
        """Calls the primary: one round of a search.

        Args:
            attempt: Makes one call over a link, within the seconds that it is given. It may be repeated.
            search: The search of this call.
            timeout_seconds: Time limit of the round.
            try_seconds: Time limit of each attempt in the first round while more than one address is known. It doubles
                with each round.
            failed: The attempt of this round that has failed already, if any: its address and error.

        Raises:
            KvpoolError: The error of the call; or UnavailableError (NO_PRIMARY) if no server of several is the primary.
        """
        due_seconds = time.monotonic() + timeout_seconds
        left_seconds = timeout_seconds
        while True:
            if failed:
                left_seconds = due_seconds - time.monotonic()
                if left_seconds <= 0:
                    raise failed[1]
                self.next_target(search, *failed)
            address = self._book.target
            limit_seconds = try_seconds * 2.0 ** min(search.num_rounds, 16) if self.has_others else inf
            try:
                link = await self.link()
                address = link.address
                return await attempt(link, min(left_seconds, limit_seconds))
            except KvpoolError as error:
                failed = address, error

    def next_target(self, search: PrimarySearch, address: str, error: KvpoolError) -> None:
        """Sets the next target after a failed attempt.

        Raises:
            KvpoolError: The error, if another server cannot help; or UnavailableError (NO_PRIMARY) at the end of a
                round, with the pause before the next one as its retry time.
        """
        self.check()
        with self._lock:
            pause_seconds = search.failed(address, error)
        if pause_seconds is None:
            raise error
        if pause_seconds:
            raise search.error() from None

    def new_search(self, *, is_any: bool = False) -> PrimarySearch:
        """Begins the search of one call. With `is_any`, any server can answer the call."""
        return PrimarySearch(self._book, is_any=is_any)

    def learn_members(self, addresses: Sequence[str]) -> None:
        """Replaces the known addresses of the shard's servers."""
        with self._lock:
            self._book.learn_members(addresses)

    async def observe(self, watch: Callable[[_LinkT], Callable[[], Awaitable[directory_pb2.Shard]]]) -> bool:
        """Observes a server other than the target, until that fails or it becomes the target itself.

        When it reports a primary of a higher term, the calls to the target are cancelled, and their callers repeat
        them there. Its reports also name the members of the shard. The target itself is observed, for the names of new
        servers, while no other server can become the primary, or none of them answers.

        Args:
            watch: Watches the shard of a server; returns a function that waits for the next message. Both raise
                KvpoolError.

        Returns:
            Whether to observe the next server now, without a pause: this one has become the target, or a standby
            has come.

        Raises:
            WrongStateError: See `check`.
        """
        with self._lock:
            self.check()
            choices = (*self._book.others, self._book.target)
            try:
                observed = self._observed = self._open_link(choices[self._num_failed_observations % len(choices)])
            except ValueError:
                self._num_failed_observations += 1
                return False
            is_other = observed.address != self._book.target
        try:
            read = watch(observed)
            while True:
                shard = await read()
                with self._lock:
                    self._report(shard)
                await self.link()
                if observed.address == self._book.target and self._book.others:
                    self._num_failed_observations = 0
                    return True
        except KvpoolError:
            self.check()
            if is_other and observed.address == self._book.target:  # `link` has closed it
                return True
            self._num_failed_observations += 1
            return False
        finally:
            await observed.close()

    def _report(self, shard: directory_pb2.Shard) -> None:
        standbys = [address for member in shard.members if not member.is_primary for address in member.addresses]
        self._book.report(shard.term, shard.primary_addresses, standbys if shard.members else None)

    def end(self) -> bool:
        """Refuses further calls. Returns whether there are links to end: not twice, nor in a forked process."""
        is_open, self._is_closed = not self._is_closed, True
        return is_open and self._pid == os.getpid()

    async def close_links(self) -> None:
        """Ends all calls, after `end`."""
        with self._lock:  # no link is opened after this: see the calls of `check`
            links = [self._link, *([self._observed] if self._observed else ())]
        for link in links:
            await link.close()


def replaced_error() -> UnavailableError:
    """Makes the error of a call that was cancelled because its server is not the primary any more."""
    return UnavailableError(REPLACED, "the client now calls another server")


def closed_error() -> WrongStateError:
    """Makes the error of a call on a connection that was closed."""
    return WrongStateError("CLOSED", "the client was closed; its sessions end with their leases: call connect() again")
