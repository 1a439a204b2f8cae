"""Tests of cluster/shard_choice.py; they cite its rules."""

from random import Random

from kvpool.server.cluster.directory import MAX_MEMBERS, Member, MemberId, ShardName, ShardRecord
from kvpool.server.cluster.shard_choice import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, ShardChoice

ADOPT_SECONDS = 30.0


def record(*zones: str, term: int = 1, first: int = 0) -> ShardRecord:
    """A record with a member per zone, the first of which is the primary."""
    members = tuple(
        Member(MemberId(f"m{number}"), (f"h{number}:1",), f"h{number}:2", zone)
        for number, zone in enumerate(zones, start=first)
    )
    return ShardRecord(term, members[0].member_id, members, "c")


def choice(zone: str = "", seed: int = 0) -> ShardChoice:
    return ShardChoice(zone, ADOPT_SECONDS, Random(seed))  # noqa: S311 - no secret


def chosen(among: ShardChoice, now_seconds: float) -> str | None:
    found = among.choose(now_seconds)
    return found[0] if found else None


def seen(records: dict[str, ShardRecord], zone: str = "", seed: int = 0) -> ShardChoice:
    """A choice for which all shards are due at `ADOPT_SECONDS`."""
    made = choice(zone, seed)
    made.saw({ShardName(name): found for name, found in records.items()}, 0.0)
    return made


def test_a_shard_is_asked_when_it_has_not_changed_for_a_while() -> None:
    """Rule 1."""
    made = seen({"s": record("")})
    assert chosen(made, ADOPT_SECONDS - 1) is None
    assert chosen(made, ADOPT_SECONDS) == "s"


def test_a_standby_that_restarts_is_not_replaced() -> None:
    """Rule 1."""
    name, made = ShardName("s"), seen({"s": record("", "")})
    made.saw({name: record("")}, 100.0)
    made.saw({name: record("", term=2)}, 110.0)  # a change of the term alone is none
    assert chosen(made, 129.0) is None
    made.saw({name: record("", "")}, 129.0)
    assert chosen(made, 131.0) is None
    assert chosen(made, 129.0 + ADOPT_SECONDS) == "s"


def test_the_newest_record_is_returned() -> None:
    made = seen({"s": record("")})
    made.saw({ShardName("s"): record("", term=5)}, 1.0)
    found = made.choose(ADOPT_SECONDS)
    assert found
    assert found[1].term == 5


def test_shards_with_fewer_standbys_come_first_then_those_without_a_server_in_the_zone() -> None:
    """Rule 2."""
    records = {
        "two": record("a", "b", "c"),
        "one": record("a", "b"),
        "none-here": record("z"),
        "none": record("a"),
    }
    for seed in range(20):
        left, order = dict(records), []
        while left:
            name = chosen(seen(left, "z", seed), ADOPT_SECONDS)
            assert name
            order.append(name)
            del left[name]
        assert order == ["none", "none-here", "one", "two"]


def test_without_a_zone_members_without_one_are_no_reason() -> None:
    records = {"a": record(""), "b": record("z")}
    assert {chosen(seen(records, "", seed), ADOPT_SECONDS) for seed in range(20)} == {"a", "b"}


def test_equal_shards_are_chosen_by_chance() -> None:
    records = {f"s{number}": record("") for number in range(5)}
    assert {chosen(seen(records, "", seed), ADOPT_SECONDS) for seed in range(100)} == set(records)


def test_the_pause_after_a_refusal_doubles_up_to_a_maximum() -> None:
    """Rule 3."""
    made, now_seconds = seen({"s": record("")}), ADOPT_SECONDS
    for number in range(20):
        pause_seconds = min(FIRST_PAUSE_SECONDS * 2**number, MAX_PAUSE_SECONDS)
        made.refused(ShardName("s"), now_seconds)
        assert chosen(made, now_seconds + 0.49 * pause_seconds) is None
        now_seconds += 1.5 * pause_seconds
        assert chosen(made, now_seconds) == "s"


def test_a_refusal_is_forgotten_when_the_members_change() -> None:
    """Rule 3."""
    name, made = ShardName("s"), seen({"s": record("", "")})
    for _ in range(10):
        made.refused(name, 100.0)
    made.saw({name: record("")}, 101.0)
    assert chosen(made, 101.0 + ADOPT_SECONDS) == "s"
    made.refused(name, 200.0)
    assert chosen(made, 200.0 + 1.5 * FIRST_PAUSE_SECONDS) == "s"


def test_another_shard_is_asked_while_one_refuses() -> None:
    made = seen({"a": record(""), "b": record("", "")})
    made.refused(ShardName("a"), ADOPT_SECONDS)
    assert chosen(made, ADOPT_SECONDS) == "b"


def test_a_shard_without_room_or_a_valid_name_is_not_asked() -> None:
    full = record(*[""] * MAX_MEMBERS)
    made = seen({"full": full, "a/b": record("")})
    assert chosen(made, ADOPT_SECONDS) is None


def test_a_shard_that_is_gone_is_forgotten() -> None:
    made = seen({"s": record("")})
    made.saw({}, 1.0)
    assert chosen(made, ADOPT_SECONDS) is None
