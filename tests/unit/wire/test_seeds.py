"""How a client finds the primary: the rules of `kvpool.wire.seeds`, without I/O."""

import pytest

from kvpool.core.errors import AbortedError, KvpoolError, NotFoundError, NotPrimaryError, UnavailableError
from kvpool.wire.errors import DeadlineError
from kvpool.wire.seeds import Location, Router, Search

A, B, C, D = "a:1", "b:1", "c:1", "d:1"
GONE = UnavailableError("UNAVAILABLE", "nothing listens there")
UNKNOWN_PRIMARY = NotPrimaryError((), 0)


def primary(term: int, *addresses: str) -> NotPrimaryError:
    return NotPrimaryError(addresses, term)


def fails(search: Search, router: Router, error: KvpoolError) -> float | None:
    """The current target fails."""
    return search.failed(router.target, error)


def test_rule_1_a_refusal_leads_to_the_primary_at_once() -> None:
    router = Router((A, B))
    assert router.target == A
    assert fails(Search(router), router, primary(3, C, D)) == 0.0
    assert (router.target, router.term, router.candidates) == (C, 3, (A, B, C, D))


@pytest.mark.parametrize("error", [GONE, UNKNOWN_PRIMARY, DeadlineError("DEADLINE_EXCEEDED", ""), primary(1, A)])
def test_rule_1_without_a_primary_the_next_address_is_called_at_once(error: KvpoolError) -> None:
    router = Router((A, B))
    assert fails(Search(router), router, error) == 0.0
    assert router.target == B


@pytest.mark.parametrize(
    "error", [NotFoundError("POOL_NOT_FOUND", ""), AbortedError("LEASE_EXPIRED", ""), UnavailableError("DRAINED", "")]
)
def test_rule_1_other_errors_of_a_server_are_final(error: KvpoolError) -> None:
    router = Router((A, B))
    assert fails(Search(router), router, error) is None
    assert router.target == A


def test_learned_addresses_are_called_after_the_seeds() -> None:
    router = Router((A, B))
    search = Search(router)
    called = []
    for error in (primary(1, C, D), GONE, GONE, GONE):
        called.append(router.target)
        assert search.failed(router.target, error) is not None
    assert called == [A, C, B, D]


def test_rule_2_a_lower_term_is_not_followed() -> None:
    router = Router((A, B))
    search = Search(router)
    fails(search, router, primary(5, C))
    assert router.target == C
    fails(search, router, primary(4, D))
    assert (router.target, router.term) == (B, 5)
    assert D not in router.candidates
    fails(search, router, primary(5, D))
    assert router.target == D


def test_rule_2_the_terms_of_a_shard_that_was_created_again_on_other_machines_are_followed() -> None:
    router = Router((A,))
    router.learn_members((A, B))
    router.report(40, (A,), (B,))
    router.report(41, (B,), (A,))
    router.learn_members((C, D))
    assert (router.target, router.term, router.others) == (C, 0, (D, A))
    router.report(1, (C,), (D,))
    router.report(2, (D,), ("e:1",))
    router.report(3, ("e:1",), ())
    assert (router.target, router.term, router.members) == ("e:1", 3, ("e:1",))


def test_rule_2_a_known_member_in_the_directory_leaves_the_known_term() -> None:
    router = Router((A,))
    router.learn_members((A, B))
    router.report(5, (A,), (B,))
    router.learn_members((B, C))
    assert (router.target, router.term, router.members) == (A, 5, (B, C))
    router.report(6, (C,), (B,))
    assert router.target == C


def test_rule_2_the_terms_of_a_shard_that_was_created_again_at_the_same_addresses_are_followed() -> None:
    router = Router((A, B))
    router.report(41, (A,), (B,))
    search = Search(router)
    assert fails(search, router, GONE) == 0.0
    assert fails(search, router, primary(3, C)) == 0.05
    assert (router.target, router.term) == (B, 3)
    assert fails(search, router, primary(3, C)) == 0.0
    assert router.target == C


def test_rule_2_a_former_server_that_names_no_primary_does_not_keep_the_known_term() -> None:
    router = Router((A, B))
    router.report(41, (A,), (B,))
    search = Search(router)
    fails(search, router, GONE)
    assert fails(search, router, NotPrimaryError((), 41)) == 0.05
    assert router.term == 0


def test_rule_2_a_round_leaves_the_term_that_a_server_has_named() -> None:
    router = Router((A, B))
    router.report(5, (A,), (B,))
    search = Search(router)
    fails(search, router, GONE)
    assert fails(search, router, primary(5, A)) == 0.05
    router.report(4, (C,), (D,))
    assert (router.term, router.members) == (5, (A, B))


def test_rule_3_servers_that_name_each_other_end_a_round() -> None:
    router = Router((A, B))
    search = Search(router)
    pauses = []
    for _ in range(20):
        pause = fails(search, router, primary(1, B if router.target == A else A))
        assert pause is not None
        pauses.append(pause)
    assert pauses[0::2] == [0.0] * 10
    assert pauses[1::2] == [0.05, 0.1, 0.2, 0.4, 0.8, *[1.0] * 5]
    assert search.num_rounds == 10


def test_rule_3_a_server_that_names_ever_new_servers_ends_a_round() -> None:
    router = Router((A,))
    search = Search(router)
    for number in range(100):
        if fails(search, router, primary(number, f"new-{number}:1")):
            break
    assert search.num_rounds == 1
    assert number == 8
    assert len(router.candidates) == 2


def test_rule_3_the_addresses_of_a_refusal_are_bounded_and_checked() -> None:
    router = Router((A,))
    fails(Search(router), router, primary(1, "http://x:1", *(f"new-{number}:1" for number in range(100))))
    assert router.target == "new-0:1"
    assert len(router.candidates) == 16


def test_rule_4_with_one_address_no_error_leads_elsewhere() -> None:
    router = Router((A,))
    search = Search(router)
    for error in (GONE, DeadlineError("DEADLINE_EXCEEDED", ""), UnavailableError("BROKEN", "")):
        assert fails(search, router, error) is None
    assert router.target == A


def test_one_address_that_knows_no_primary_is_asked_again_after_a_pause() -> None:
    router = Router((A,))
    search = Search(router)
    assert fails(search, router, UNKNOWN_PRIMARY) == 0.05
    assert router.target == A
    assert (search.error().reason, search.error().retry_seconds) == ("NO_PRIMARY", 0.05)


def test_a_round_begins_with_a_server_that_answers() -> None:
    router = Router((A, B, C))
    search = Search(router)
    assert [fails(search, router, error) for error in (GONE, UNKNOWN_PRIMARY, GONE)] == [0.0, 0.0, 0.05]
    assert router.target == B


def test_the_error_states_what_each_address_answered_in_the_last_round() -> None:
    router = Router((A, B))
    search = Search(router)
    for error in (
        UNKNOWN_PRIMARY,
        UNKNOWN_PRIMARY,
        UnavailableError("UNAVAILABLE", f"{A}: nothing listens there"),
        primary(7, A),
    ):
        fails(search, router, error)
    assert str(search.error()) == (
        "no server is the primary: a:1: nothing listens there; "
        "b:1: the server is not the primary of its shard; the primary of term 7 is at a:1"
    )


def test_a_target_that_another_call_found_is_called_first() -> None:
    router = Router((A, B, C))
    mine, other = Search(router), Search(router)
    other.failed(A, primary(1, C))
    assert mine.failed(A, GONE) == 0.0
    assert router.target == C


def test_a_report_of_a_higher_term_moves_the_target() -> None:
    router = Router((A, B))
    router.report(4, (A,))
    assert (router.target, router.term) == (A, 4)
    router.report(5, (B,))
    assert (router.target, router.term) == (B, 5)
    router.report(4, (A,))
    assert (router.target, router.term) == (B, 5)
    router.report(6, ())
    assert (router.target, router.term) == (B, 5)


def test_the_first_report_does_not_move_a_target_that_has_another_name() -> None:
    router = Router((A, B))
    router.report(4, (C,))
    assert (router.target, router.candidates) == (A, (A, B, C))
    router.report(4, (C,))
    assert router.target == A


def test_members_are_called_before_seeds_and_replaced_by_later_reports() -> None:
    router = Router((A, B))
    router.report(1, (A,), (C,))
    assert router.candidates == (A, C, B)
    assert router.others == (C,)
    router.report(1, (A,), (D,))
    assert router.candidates == (A, D, B)
    router.report(2, (D,), ())
    assert (router.target, router.candidates) == (D, (D, A, B))
    assert not router.others


def test_a_report_of_a_lower_term_names_no_members() -> None:
    router = Router((A,))
    router.report(2, (A,), (B,))
    router.report(1, (C,), (D,))
    assert router.candidates == (A, B)


def test_without_a_report_of_standbys_all_other_addresses_are_others() -> None:
    router = Router((A, B))
    router.report(1, (C,))
    assert router.others == (B, C)


def test_all_members_are_asked_in_a_round_also_if_the_seeds_are_gone() -> None:
    seeds = tuple(f"old-{number}:1" for number in range(16))
    router = Router(seeds)
    router.learn_members((C, D))
    search, asked = Search(router), []
    while True:
        asked.append(router.target)
        if fails(search, router, GONE):
            break
    assert asked[1:3] == [C, D]
    assert len(asked) == 18


def test_rule_1_any_server_is_asked_where_one_is_unavailable() -> None:
    router = Router((A, B))
    search = Search(router, is_any=True)
    unknown = UnavailableError("DIRECTORY_UNKNOWN", "")
    assert fails(search, router, unknown) == 0.0
    assert router.target == B
    assert fails(search, router, unknown) == 0.05
    assert fails(Search(router, is_any=True), router, NotFoundError("POOL_NOT_FOUND", "")) is None


def test_the_server_that_was_asked_is_called_first_if_it_is_of_the_shard() -> None:
    assert Location.of("s", ["a:1", "b:1"], "unix:/c").addresses == ("unix:/c", "a:1", "b:1")
    assert Location.of("s", ["a:1", "b:1"], "b:1").addresses == ("b:1", "a:1")
    assert Location.of("s", ["a:1", "b:1"]).addresses == ("a:1", "b:1")
    assert Location.of("", [], "unix:/c").addresses == ()


def test_a_location_has_the_valid_ones_of_the_first_addresses() -> None:
    many = [f"new-{number}:1" for number in range(300)]
    assert Location.of("s", ["http://x:1", "a:1,b:1", "unix:relative", *many]).addresses == tuple(many[:13])
    assert Location.of("", many) == Location("", ())


@pytest.mark.parametrize("addresses", [[], ["http://x:1", "", "a:1,b:1", "unix:/a,b", "a:99999"]])
def test_a_location_without_a_valid_address_is_refused(addresses: list[str]) -> None:
    with pytest.raises(UnavailableError, match="no valid address of a server of shard 's'") as caught:
        Location.of("s", addresses)
    assert caught.value.reason == "NO_ADDRESS"
