"""Finds the primary from the addresses that a client knows. No I/O, no clock, no thread.

1. A client calls one server, its target. It calls another address only after the target has refused a call with
   NOT_PRIMARY, or cannot be reached. A call that any server can answer also moves on if the target is UNAVAILABLE.
2. Terms only rise: a client ignores a primary of a lower term than the highest known one. Terms of new servers begin
   with 1. So at the end of a round the client forgets the known term; it then knows the terms that the servers of this
   round have named.
3. In a round, a search calls each address once, and a bounded number of addresses. So servers that name each other end
   a round, and the caller waits before the next one.
4. With one address that never answers NOT_PRIMARY, no error causes another call.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final

from kvpool.core.errors import KvpoolError, NotPrimaryError, UnavailableError
from kvpool.wire.address import parse_seeds
from kvpool.wire.backoff import Backoff
from kvpool.wire.errors import DeadlineError

NO_PRIMARY: Final = "NO_PRIMARY"
"""Reason of the error of a round in which no server was the primary."""
_MAX_LEARNED: Final = 16
"""Most addresses that are kept of one primary, and of the members."""
_MAX_HOPS: Final = 8
"""Most addresses that are asked in a round beyond the seeds and the members."""
_UNREACHABLE: Final = frozenset(("UNAVAILABLE", "BROKEN", "ENDED", "STREAM_ENDED", "SILENT", "CANCELLED", "NO_ACCESS"))
"""Reasons of UnavailableError that no server sends."""


class AddressBook:
    """The addresses of the servers, and which of them a client calls. All searches of the client share it.

    A caller with threads holds a lock around each method.

    Attributes:
        seeds: The addresses that the client was given, at least one.
        target: Address of the server to call.
        term: The highest term of a primary that a server has named; 0 if none has.
        members: Addresses of the servers that were in sync at the last report; empty before the first.
        candidates: All addresses: the members, the seeds, then the addresses of the newest primary.
    """

    def __init__(self, seeds: tuple[str, ...]) -> None:
        self.seeds = seeds
        self.target = seeds[0]
        self.term = 0
        self.members: tuple[str, ...] = ()
        self.candidates = seeds
        self._primary: tuple[str, ...] = ()
        self._standbys: tuple[str, ...] | None = None
        """Addresses of the standbys at the last report; None before the first."""

    @property
    def others(self) -> tuple[str, ...]:
        """Addresses other than the target of servers that can become the primary."""
        servers = self.candidates if self._standbys is None else self._standbys
        return tuple(address for address in servers if address != self.target)

    def learn(self, term: int, addresses: Sequence[str]) -> tuple[str, ...]:
        """Records the primary. Returns its valid addresses; none if a primary of a higher term is known."""
        found = valid_addresses(addresses)
        if not found or term < self.term:
            return ()
        self.term, self._primary = term, found
        self._collect()
        return found

    def report(self, term: int, addresses: Sequence[str], standbys: Sequence[str] | None = None) -> None:
        """Handles a report of an observed server. A primary of a higher term becomes the target.

        The first report only sets the term: the target may be the primary under another address.

        Args:
            term: The term of the primary.
            addresses: Addresses of the primary.
            standbys: Addresses of the standbys that are in sync; None if they are not reported.
        """
        if term < self.term:
            return
        is_newer = 0 < self.term < term
        if standbys is not None:
            self.members = valid_addresses((*addresses, *standbys)) or self.members
            self._collect()
            self._standbys = valid_addresses(standbys)
        found = self.learn(term, addresses)
        if found and is_newer and self.target not in found:
            self.target = found[0]

    def end_round(self, target: str, term: int) -> None:
        """Ends a round in which no server was the primary.

        Args:
            target: Address of the server to call first in the next round.
            term: The highest term of a primary that a server has named in the round; 0 if none has.
        """
        self.target, self.term = target, min(self.term, term)

    def _collect(self) -> None:
        self.candidates = tuple(dict.fromkeys((*self.members, *self.seeds, *self._primary)))


class PrimarySearch:
    """The search of one call for the primary, over all its attempts.

    Attributes:
        num_rounds: Number of rounds in which no server was the primary.
    """

    def __init__(self, book: AddressBook, *, is_any: bool = False) -> None:
        """Begins the search.

        Args:
            book: The addresses.
            is_any: Whether any server can answer the call, also one that is not the primary.
        """
        self.num_rounds = 0
        self._book = book
        self._is_any = is_any
        self._answers: dict[str, KvpoolError] = {}
        """The error of each address that was called in this round."""
        self._answers_before: dict[str, KvpoolError] = {}
        """The same, in the last whole round."""
        self._backoff = Backoff(0.05, 1.0, jitter=0.0)  # callers extend the pause
        self._pause_seconds = 0.0

    def failed(self, address: str, error: KvpoolError) -> float | None:
        """Handles a failed attempt, and sets the target of the next one.

        Args:
            address: The server that was called.
            error: The error.

        Returns:
            The pause before the next attempt in seconds: 0 within a round. None if another address cannot help.
        """
        book = self._book
        named: tuple[str, ...] = ()
        if isinstance(error, NotPrimaryError):
            named = book.learn(error.term, error.addresses)
        elif not self._allows_another(error) or book.candidates == (address,):
            return None
        is_repeated = address in self._answers
        self._answers[address] = error
        if not is_repeated and len(self._answers) < len({*book.seeds, *book.members}) + _MAX_HOPS:
            # Another call of the client may have found a better target meanwhile.
            for following in (*named, book.target, *book.candidates):
                if following not in self._answers:
                    book.target = following
                    return 0.0
        return self._end_round()

    def error(self) -> UnavailableError:
        """The error of the last round; states what each address answered, and when to begin the next round."""
        answers = "; ".join(f"{address}: {_text(address, error)}" for address, error in self._answers_before.items())
        what = "no server can answer" if self._is_any else "no server is the primary"
        return UnavailableError(NO_PRIMARY, f"{what}: {answers}", retry_seconds=self._pause_seconds)

    def _allows_another(self, error: KvpoolError) -> bool:
        return is_unreachable(error) or (self._is_any and isinstance(error, UnavailableError))

    def _end_round(self) -> float:
        # A server that answers will know the next primary, or become it.
        refusals = {address: error for address, error in self._answers.items() if isinstance(error, NotPrimaryError)}
        term = max((error.term for error in refusals.values() if error.addresses), default=0)
        self._book.end_round(next(iter(refusals), self._book.candidates[0]), term)
        self._answers_before, self._answers = self._answers, {}
        self.num_rounds += 1
        self._pause_seconds = self._backoff.next()
        return self._pause_seconds


def is_unreachable(error: KvpoolError) -> bool:
    """Whether a server cannot be reached or does not answer."""
    return isinstance(error, DeadlineError) or (isinstance(error, UnavailableError) and error.reason in _UNREACHABLE)


def valid_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Returns the valid addresses among the first 16 that a server reports, each once."""
    return tuple(address for address in dict.fromkeys(islice(addresses, _MAX_LEARNED)) if _is_valid(address))


def _is_valid(address: str) -> bool:
    try:
        return parse_seeds(address) == (address,)
    except ValueError:
        return False


def _text(address: str, error: KvpoolError) -> str:
    return str(error).removeprefix(f"{address}: ")
