"""The connection of a client to the primary, and the errors of its calls."""

import os
import threading
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, TypeVar

import grpc

from kvpool.client.retries import Retries
from kvpool.client.server_link import ServerLink
from kvpool.core.errors import KvpoolError, NotPrimaryError, UnavailableError, WrongStateError
from kvpool.v1 import directory_pb2
from kvpool.wire.address import parse_seeds
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import DeadlineError, from_rpc_error, not_sent_error
from kvpool.wire.seeds import AddressBook, PrimarySearch

REPLACED: Final = ("CANCELLED", "the client now calls another server")
"""Reason and text of the error of a call that was cancelled because its server is not the primary any more."""


_T = TypeVar("_T")


class PrimaryConnection:
    """The connection to the primary, replaced when another server becomes the primary.

    It belongs to the process that made it: a forked process has none of its threads. Threads may share it. Its
    coroutines suspend only where those of the link do.

    Attributes:
        token_source: Says where the token comes from.
    """

    def __init__(
        self,
        address: str,
        access: ClientCredentials,
        open_link: Callable[[str], ServerLink],
        *,
        is_patient: bool = True,
    ) -> None:
        """Opens a link to the first address.

        Args:
            address: One address, or several separated by commas.
            access: Credentials for all of them.
            open_link: Makes a link, which connects at its first call. Raises ValueError if the token may not be sent to
                the address, or a file cannot be read.
            is_patient: Whether to repeat a call that may have reached the primary, and to wait for a server that cannot
                be reached; see `kvpool.client.retries`.

        Raises:
            ValueError: An address is malformed, or see `open_link`.
        """
        seeds = parse_seeds(address)
        for seed in seeds[1:]:
            access.check(seed)
        self._book = AddressBook(seeds)
        self._open_link = open_link
        self._is_patient = is_patient
        self.token_source = access.token_source
        self._lock = threading.Lock()
        self._link = open_link(seeds[0])
        self._observed: ServerLink | None = None
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

    def error_of(self, error: grpc.RpcError, link: ServerLink) -> KvpoolError:
        """Decodes the error of a call. Names the server that cannot be reached, or the token that it refuses."""
        if error.code() is grpc.StatusCode.CANCELLED and self.is_replaced(link):
            return UnavailableError(*REPLACED)
        return from_rpc_error(error, link.address, self.token_source)

    def is_replaced(self, link: ServerLink) -> bool:
        """Whether another link has replaced this one."""
        return link is not self._link

    async def link(self) -> ServerLink:
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
                    raise not_sent_error("NO_ACCESS", str(error)) from None
                old, self._link = self._link, opened
                observed = self._observed if self._observed and self._observed.address == target else None
            await old.close()
            if observed:  # another server has to be observed from now on
                await observed.close()
        return self._link

    async def call(
        self,
        attempt: Callable[[ServerLink, float], Awaitable[_T]],
        deadline_seconds: float,
        sleep: Callable[[float], Awaitable[object]] | None,
        *,
        is_any: bool = False,
        try_seconds: float = inf,
    ) -> _T:
        """Calls the primary until it answers. Searches for it, and waits, only after the first attempt has failed.

        Args:
            attempt: Makes one call over a link, within the seconds that it is given. It may be repeated.
            deadline_seconds: Time limit of all attempts together.
            sleep: Waits between two rounds of the search; None to make one round.
            is_any: Whether any server can answer the call, also one that is not the primary. It only reads.
            try_seconds: Time limit of the first attempt, and of each further one in the first round while more than one
                address is known. It doubles with each round. A connection that is not patient has none.

        Raises:
            KvpoolError: The error of the call, see `Retries.pause_seconds`; or UnavailableError (NO_PRIMARY) if no
                server of several is the primary.
        """
        try_seconds = try_seconds if self._is_patient else inf
        started_seconds, left_seconds = time.monotonic(), deadline_seconds
        limit_seconds = min(left_seconds, try_seconds)
        search: PrimarySearch | None = None
        retries: Retries | None = None
        while True:
            link, address = self._link, self._book.target
            try:
                if link.address != address:
                    link = await self.link()
                    address = link.address
                return await attempt(link, limit_seconds)
            except KvpoolError as error:
                was_refused = isinstance(error, NotPrimaryError) or not error.was_sent
                if not (self._is_patient or is_any or was_refused):
                    raise
                search = search or self.new_search(is_any=is_any)
                retries = retries or Retries(started_seconds, deadline_seconds, is_patient=self._is_patient)
                failure = self.next_target(search, address, error)
                if failure is None and retries.left_seconds <= 0:
                    failure = search.error() if search.num_rounds else error
                if failure and sleep is None:
                    raise failure from None
                was_cut = limit_seconds < left_seconds and isinstance(error, DeadlineError)
                pause_seconds = retries.pause_seconds(failure, was_cut=was_cut) if failure else 0.0
            if sleep and pause_seconds:
                await sleep(pause_seconds)
            left_seconds = limit_seconds = retries.left_seconds
            if self.has_others:
                limit_seconds = min(left_seconds, try_seconds * 2.0 ** min(search.num_rounds, 16))

    def next_target(self, search: PrimarySearch, address: str, error: KvpoolError) -> KvpoolError | None:
        """Sets the next target after a failed attempt.

        Returns:
            None to call it at once. The error, if another server cannot help; or UnavailableError (NO_PRIMARY) at the
            end of a round, with the pause before the next one as its retry time.

        Raises:
            WrongStateError: See `check`.
        """
        self.check()
        with self._lock:
            pause_seconds = search.failed(address, error)
        return error if pause_seconds is None else search.error() if pause_seconds else None

    def new_search(self, *, is_any: bool = False) -> PrimarySearch:
        """Begins the search of one call. With `is_any`, any server can answer the call."""
        return PrimarySearch(self._book, is_any=is_any)

    async def observe(self, watch: Callable[[ServerLink], Callable[[], Awaitable[directory_pb2.Shard]]]) -> bool:
        """Observes a server other than the target, until that fails or it becomes the target itself.

        When it reports a primary of a higher term, the calls to the target are cancelled, and their callers repeat
        them there. Its reports also name the members. The target itself is observed, for the names of new
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


def closed_error() -> WrongStateError:
    """Makes the error of a call on a connection that was closed."""
    return WrongStateError("CLOSED", "the client was closed; its sessions end with their leases: call connect() again")
