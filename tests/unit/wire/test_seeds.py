"""How a client finds the primary: the rules of `kvpool.wire.seeds`, without I/O."""

import pytest

from kvpool.core.errors import AbortedError, KvpoolError, NotFoundError, NotPrimaryError, UnavailableError
from kvpool.wire.errors import DeadlineError
from kvpool.wire.seeds import AddressBook, PrimarySearch

A, B, C, D = "a:1", "b:1", "c:1", "d:1"
GONE = UnavailableError("UNAVAILABLE", "nothing listens there")
UNKNOWN_PRIMARY = NotPrimaryError((), 0)


def primary(term: int, *addresses: str) -> NotPrimaryError:
    return NotPrimaryError(addresses, term)


def fails(search: PrimarySearch, book: AddressBook, error: KvpoolError) -> float | None:
    """The current target fails."""
    return search.failed(book.target, error)


def test_rule_1_a_refusal_leads_to_the_primary_at_once() -> None:
    book = AddressBook((A, B))
    assert book.target == A
    assert fails(PrimarySearch(book), book, primary(3, C, D)) == 0.0
    assert (book.target, book.term, book.candidates) == (C, 3, (A, B, C, D))


@pytest.mark.parametrize("error", [GONE, UNKNOWN_PRIMARY, DeadlineError("DEADLINE_EXCEEDED", ""), primary(1, A)])
def test_rule_1_without_a_primary_the_next_address_is_called_at_once(error: KvpoolError) -> None:
    book = AddressBook((A, B))
    assert fails(PrimarySearch(book), book, error) == 0.0
    assert book.target == B


@pytest.mark.parametrize(
    "error", [NotFoundError("POOL_NOT_FOUND", ""), AbortedError("LEASE_EXPIRED", ""), UnavailableError("DRAINED", "")]
)
def test_rule_1_other_errors_of_a_server_are_final(error: KvpoolError) -> None:
    book = AddressBook((A, B))
    assert fails(PrimarySearch(book), book, error) is None
    assert book.target == A


def test_learned_addresses_are_called_after_the_seeds() -> None:
    book = AddressBook((A, B))
    search = PrimarySearch(book)
    called = []
    for error in (primary(1, C, D), GONE, GONE, GONE):
        called.append(book.target)
        assert search.failed(book.target, error) is not None
    assert called == [A, C, B, D]


def test_rule_2_a_lower_term_is_not_followed() -> None:
    book = AddressBook((A, B))
    search = PrimarySearch(book)
    fails(search, book, primary(5, C))
    assert book.target == C
    fails(search, book, primary(4, D))
    assert (book.target, book.term) == (B, 5)
    assert D not in book.candidates
    fails(search, book, primary(5, D))
    assert book.target == D


def test_rule_2_the_terms_of_a_shard_that_was_created_again_at_the_same_addresses_are_followed() -> None:
    book = AddressBook((A, B))
    book.report(41, (A,), (B,))
    search = PrimarySearch(book)
    assert fails(search, book, GONE) == 0.0
    assert fails(search, book, primary(3, C)) == 0.05
    assert (book.target, book.term) == (B, 3)
    assert fails(search, book, primary(3, C)) == 0.0
    assert book.target == C


def test_rule_2_a_former_server_that_names_no_primary_does_not_keep_the_known_term() -> None:
    book = AddressBook((A, B))
    book.report(41, (A,), (B,))
    search = PrimarySearch(book)
    fails(search, book, GONE)
    assert fails(search, book, NotPrimaryError((), 41)) == 0.05
    assert book.term == 0


def test_rule_2_a_round_leaves_the_term_that_a_server_has_named() -> None:
    book = AddressBook((A, B))
    book.report(5, (A,), (B,))
    search = PrimarySearch(book)
    fails(search, book, GONE)
    assert fails(search, book, primary(5, A)) == 0.05
    book.report(4, (C,), (D,))
    assert (book.term, book.members) == (5, (A, B))


def test_rule_3_servers_that_name_each_other_end_a_round() -> None:
    book = AddressBook((A, B))
    search = PrimarySearch(book)
    pauses = []
    for _ in range(20):
        pause = fails(search, book, primary(1, B if book.target == A else A))
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


def test_rule_4_with_one_address_no_error_leads_elsewhere() -> None:
    book = AddressBook((A,))
    search = PrimarySearch(book)
    for error in (GONE, DeadlineError("DEADLINE_EXCEEDED", ""), UnavailableError("BROKEN", "")):
        assert fails(search, book, error) is None
    assert book.target == A


def test_one_address_that_knows_no_primary_is_asked_again_after_a_pause() -> None:
    book = AddressBook((A,))
    search = PrimarySearch(book)
    assert fails(search, book, UNKNOWN_PRIMARY) == 0.05
    assert book.target == A
    assert (search.error().reason, search.error().retry_seconds) == ("NO_PRIMARY", 0.05)


def test_a_round_begins_with_a_server_that_answers() -> None:
    book = AddressBook((A, B, C))
    search = PrimarySearch(book)
    assert [fails(search, book, error) for error in (GONE, UNKNOWN_PRIMARY, GONE)] == [0.0, 0.0, 0.05]
    assert book.target == B


def test_the_error_states_what_each_address_answered_in_the_last_round() -> None:
    book = AddressBook((A, B))
    search = PrimarySearch(book)
    for error in (
        UNKNOWN_PRIMARY,
        UNKNOWN_PRIMARY,
        UnavailableError("UNAVAILABLE", f"{A}: nothing listens there"),
        primary(7, A),
    ):
        fails(search, book, error)
    assert str(search.error()) == (
        "no server is the primary: a:1: nothing listens there; "
        "b:1: the server is not the primary of its shard; the primary of term 7 is at a:1"
    )


def test_a_target_that_another_call_found_is_called_first() -> None:
    book = AddressBook((A, B, C))
    mine, other = PrimarySearch(book), PrimarySearch(book)
    other.failed(A, primary(1, C))
    assert mine.failed(A, GONE) == 0.0
    assert book.target == C


def test_a_report_of_a_higher_term_moves_the_target() -> None:
    book = AddressBook((A, B))
    book.report(4, (A,))
    assert (book.target, book.term) == (A, 4)
    book.report(5, (B,))
    assert (book.target, book.term) == (B, 5)
    book.report(4, (A,))
    assert (book.target, book.term) == (B, 5)
    book.report(6, ())
    assert (book.target, book.term) == (B, 5)


def test_the_first_report_does_not_move_a_target_that_has_another_name() -> None:
    book = AddressBook((A, B))
    book.report(4, (C,))
    assert (book.target, book.candidates) == (A, (A, B, C))
    book.report(4, (C,))
    assert book.target == A


def test_members_are_called_before_seeds_and_replaced_by_later_reports() -> None:
    book = AddressBook((A, B))
    book.report(1, (A,), (C,))
    assert book.candidates == (A, C, B)
    assert book.others == (C,)
    book.report(1, (A,), (D,))
    assert book.candidates == (A, D, B)
    book.report(2, (D,), ())
    assert (book.target, book.candidates) == (D, (D, A, B))
    assert not book.others


def test_a_report_of_a_lower_term_names_no_members() -> None:
    book = AddressBook((A,))
    book.report(2, (A,), (B,))
    book.report(1, (C,), (D,))
    assert book.candidates == (A, B)


def test_without_a_report_of_standbys_all_other_addresses_are_others() -> None:
    book = AddressBook((A, B))
    book.report(1, (C,))
    assert book.others == (B, C)


def test_all_members_are_asked_in_a_round_also_if_the_seeds_are_gone() -> None:
    seeds = tuple(f"old-{number}:1" for number in range(16))
    book = AddressBook(seeds)
    book.report(1, (), (C, D))
    search, asked = PrimarySearch(book), []
    while True:
        asked.append(book.target)
        if fails(search, book, GONE):
            break
    assert asked[1:3] == [C, D]
    assert len(asked) == 18


def test_rule_1_any_server_is_asked_where_one_is_unavailable() -> None:
    book = AddressBook((A, B))
    search = PrimarySearch(book, is_any=True)
    unknown = UnavailableError("STOPPING", "")
    assert fails(search, book, unknown) == 0.0
    assert book.target == B
    assert fails(search, book, unknown) == 0.05
    assert fails(PrimarySearch(book, is_any=True), book, NotFoundError("POOL_NOT_FOUND", "")) is None
