"""How a client finds the primary: the rules of `kvpool.wire.seeds`, without I/O."""

from pathlib import Path

from kvpool.core import errors
from kvpool.wire.errors import DeadlineError
from kvpool.wire.seeds import AddressBook, PrimarySearch
from support.transcripts import check

A = "a:1"
GONE = errors.UnavailableError("UNAVAILABLE", "nothing listens there")
ERRORS = {
    "UNAVAILABLE": GONE,
    "NOT_PRIMARY": errors.NotPrimaryError((), 0),
    "DEADLINE": DeadlineError("DEADLINE_EXCEEDED", ""),
    "POOL_NOT_FOUND": errors.NotFoundError("POOL_NOT_FOUND", ""),
    "LEASE_EXPIRED": errors.AbortedError("LEASE_EXPIRED", ""),
    "DRAINED": errors.UnavailableError("DRAINED", ""),
    "BROKEN": errors.UnavailableError("BROKEN", ""),
}


def primary(term: int, *addresses: str) -> errors.NotPrimaryError:
    return errors.NotPrimaryError(addresses, term)


class SeedsTranscript:
    """A search of the primary: its target `fails`, `refuses` with a term and a primary, or a `report` comes.

    Servers have names of one letter.
    """

    book: AddressBook
    search: PrimarySearch

    def execute(self, command: str, *words: str) -> list[str]:
        names = [f"{word}:1" for word in words if len(word) == 1 and word.isalpha()]
        lines = []
        match command, *words:
            case "seeds", *_:
                self.book = AddressBook(tuple(names))
                self.search = PrimarySearch(self.book, is_any="any" in words)
            case ("search",):
                self.search = PrimarySearch(self.book)
            case "fails", reason, *_:
                lines = self._failed(ERRORS[reason], *names)
            case "refuses", term, *_:
                lines = self._failed(primary(int(term), *names))
            case "report", term, *_:
                at = words.index("members") - 1 if "members" in words else len(names)
                self.book.report(int(term), tuple(names[:at]), tuple(names[at:]) if "members" in words else None)
            case ("error",):
                error = self.search.error()
                return [f"{error.reason}, again in {error.retry_seconds} s: {error}"]
        book = self.book
        shown = [" ".join(address[0] for address in each) or "none" for each in (book.candidates, book.others)]
        return [*lines, f"calls {book.target[0]}; term {book.term}; of {shown[0]}; others {shown[1]}"]

    def _failed(self, error: errors.KvpoolError, *at: str) -> list[str]:
        pause_seconds = self.search.failed(at[0] if at else self.book.target, error)
        return ["is final" if pause_seconds is None else f"tries again in {pause_seconds:g} s"]


def test_the_search_does_what_the_transcript_shows() -> None:
    check(Path(__file__).with_name("transcripts") / "seeds.txt", SeedsTranscript().execute)


def fails(search: PrimarySearch, book: AddressBook, error: errors.KvpoolError) -> float | None:
    """The current target fails."""
    return search.failed(book.target, error)


def test_rule_3_servers_that_name_each_other_end_a_round() -> None:
    book = AddressBook((A, "b:1"))
    search = PrimarySearch(book)
    pauses = []
    for _ in range(20):
        pause = fails(search, book, primary(1, "b:1" if book.target == A else A))
        assert pause is not None
        pauses.append(pause)
    assert pauses[0::2] == [0.0] * 10
    assert pauses[1::2] == [0.05, 0.1, 0.2, 0.4, 0.8, *[1.0] * 5]
    assert search.num_rounds == 10


def test_rule_3_a_server_that_names_ever_new_servers_ends_a_round() -> None:
    book = AddressBook((A,))
    search = PrimarySearch(book)
    for number in range(100):
        if fails(search, book, primary(number, f"new-{number}:1")):
            break
    assert search.num_rounds == 1
    assert number == 8
    assert len(book.candidates) == 2


def test_rule_3_the_addresses_of_a_refusal_are_bounded_and_checked() -> None:
    book = AddressBook((A,))
    fails(PrimarySearch(book), book, primary(1, "http://x:1", *(f"new-{number}:1" for number in range(100))))
    assert book.target == "new-0:1"
    assert len(book.candidates) == 16


def test_all_members_are_asked_in_a_round_also_if_the_seeds_are_gone() -> None:
    seeds = tuple(f"old-{number}:1" for number in range(16))
    book = AddressBook(seeds)
    book.report(1, (), ("c:1", "d:1"))
    search, asked = PrimarySearch(book), []
    while True:
        asked.append(book.target)
        if fails(search, book, GONE):
            break
    assert asked[1:3] == ["c:1", "d:1"]
    assert len(asked) == 18
