"""Finds the primary of a shard from the addresses that a client knows. No I/O, no clock, no thread.

1. A client calls one server, its target. It goes on to another address only if the target refuses a call with
   NOT_PRIMARY, or cannot be reached.
2. Terms only rise: a primary of a lower term than the highest known one is not followed.
3. In a round, a search asks each address once, and a bounded number of them. So servers that name each other end a
   round, and the caller waits before the next one.
4. With one address that never answers NOT_PRIMARY, no error leads to another call.
"""

from typing import Final

from kvpool.core.errors import KvpoolError, NotPrimaryError, UnavailableError
from kvpool.wire.address import check_address
from kvpool.wire.errors import DeadlineError

NO_PRIMARY: Final = "NO_PRIMARY"
"""Reason of the error of a round in which no server was the primary."""
_FIRST_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 1.0
_MAX_LEARNED: Final = 16
"""Most addresses that are kept of one primary."""
_MAX_HOPS: Final = 8
"""Most addresses beyond the seeds that are asked in a round."""
_UNREACHABLE: Final = frozenset(("UNAVAILABLE", "BROKEN", "ENDED", "STREAM_ENDED", "SILENT", "CANCELLED", "NO_ACCESS"))
"""Reasons of UnavailableError that no server sends."""


class Router:
    """Which server a client calls. Its searches share it. A caller with threads holds a lock around each method.

    Attributes:
        seeds: The addresses that the client was given, at least one.
        target: Address of the server to call.
        term: The highest term of a primary that a server has named; 0 if none has.
        candidates: All addresses: the seeds, then those of the newest primary.
    """

    def __init__(self, seeds: tuple[str, ...]) -> None:
        self.seeds = seeds
        self.target = seeds[0]
        self.term = 0
        self.candidates = seeds

    def learn(self, term: int, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Notes who is the primary. Returns its valid addresses; none if a primary of a higher term is known."""
        found = tuple(address for address in addresses[:_MAX_LEARNED] if _is_valid(address))
        if not found or term < self.term:
            return ()
        self.term, self.candidates = term, tuple(dict.fromkeys((*self.seeds, *found)))
        return found

    def report(self, term: int, addresses: tuple[str, ...]) -> None:
        """Notes what another server than the target reports. A primary of a higher term becomes the target.

        The first report only tells the term of today's primary, which the target may be under another address.
        """
        is_newer = 0 < self.term < term
        found = self.learn(term, addresses)
        if found and is_newer and self.target not in found:
            self.target = found[0]


class Search:
    """The way of one call to the primary, over all its repetitions.

    Attributes:
        num_rounds: Number of rounds in which no server was the primary.
    """

    def __init__(self, router: Router) -> None:
        self.num_rounds = 0
        self._router = router
        self._said: dict[str, KvpoolError] = {}
        """What each address has answered in this round."""
        self._said_before: dict[str, KvpoolError] = {}
        """The same, in the last whole round."""
        self._pause_seconds = 0.0

    def failed(self, address: str, error: KvpoolError) -> float | None:
        """Notes that a call failed, and sets the target of the next one.

        Args:
            address: The server that was called.
            error: The error.

        Returns:
            The pause before the next call in seconds: 0 within a round. None if another address cannot help.
        """
        router = self._router
        named: tuple[str, ...] = ()
        if isinstance(error, NotPrimaryError):
            named = router.learn(error.term, error.addresses)
        elif not _is_unreachable(error) or router.candidates == (address,):
            return None
        is_repeated = address in self._said
        self._said[address] = error
        if not is_repeated and len(self._said) < len(router.seeds) + _MAX_HOPS:
            # Another call of the client may have found a better target meanwhile.
            for following in (*named, router.target, *router.candidates):
                if following not in self._said:
                    router.target = following
                    return 0.0
        return self._end_round()

    def error(self) -> UnavailableError:
        """The error of the last round; states what each address answered, and when to begin the next round."""
        said = "; ".join(f"{address}: {_text(address, error)}" for address, error in self._said_before.items())
        return UnavailableError(NO_PRIMARY, f"no server is the primary: {said}", retry_seconds=self._pause_seconds)

    def _end_round(self) -> float:
        # A server that answers will know the next primary, or become it.
        answering = (address for address, error in self._said.items() if isinstance(error, NotPrimaryError))
        self._router.target = next(answering, self._router.seeds[0])
        self._said_before, self._said = self._said, {}
        self.num_rounds += 1
        self._pause_seconds = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_rounds - 1, 16), _MAX_PAUSE_SECONDS)
        return self._pause_seconds


def _is_unreachable(error: KvpoolError) -> bool:
    return isinstance(error, DeadlineError) or (isinstance(error, UnavailableError) and error.reason in _UNREACHABLE)


def _is_valid(address: str) -> bool:
    try:
        check_address(address)
    except ValueError:
        return False
    return True


def _text(address: str, error: KvpoolError) -> str:
    return str(error).removeprefix(f"{address}: ")
