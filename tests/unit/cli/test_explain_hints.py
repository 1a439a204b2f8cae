"""The sentences of `kvpool explain`."""

from dataclasses import replace

import pytest

from kvpool.cli.explain_hints import MEANINGS, end_sentence, hints
from kvpool.client import PoolInfo
from kvpool.client.admin import GroupEnd, MissCount, MissesInfo, MissReason, ScopeInfo, UnexecutedBlocks
from kvpool.core.ids import GroupId
from kvpool.core.specs.pool_config import HashScheme
from kvpool.core.views.pool_info import GroupInfo
from support.operator import pool_info

FACTS = MissesInfo(
    HashScheme(none_hash=b"secret"),
    (ScopeInfo("", has_namespace=False, cached_blocks=3, sessions=1, is_own=True),),
    (UnexecutedBlocks(7, "front-end", 4, 2, 1),),
    768,
)


def info_with(*misses: MissCount) -> PoolInfo:
    return pool_info(groups=(GroupInfo("full_attention", 1, 2, 3, 4, misses),))


@pytest.mark.parametrize("reason", MissReason)
def test_each_reason_has_a_meaning_and_a_hint(reason: MissReason) -> None:
    found = hints(info_with(MissCount(reason, 2, 32)), FACTS)
    assert found[0].startswith("100% of the missed tokens: ")
    assert len(found) == 2
    assert MEANINGS[reason]
    assert "secret" not in "".join(found)


def test_the_most_expensive_reason_comes_first_and_cheap_ones_are_left_out() -> None:
    counts = {MissReason.RESET: 10, MissReason.EVICTED: 90, MissReason.UNSEEN: 900, MissReason.NOT_EXECUTED: 5}
    found = hints(info_with(*(MissCount(reason, 1, tokens) for reason, tokens in counts.items())), FACTS)
    assert [hint.partition(" ")[0] for hint in found[:-1]] == ["89.6%", "9.0%"]
    assert "at most 768 blocks more than the 101 of the pool" in found[1]


def test_hints_name_sessions_versions_and_namespaces() -> None:
    scopes = (*FACTS.scopes, ScopeInfo("v2", has_namespace=True, cached_blocks=1, sessions=0, is_own=False))
    (not_executed, _) = hints(info_with(MissCount(MissReason.NOT_EXECUTED, 1, 16)), FACTS)
    assert "Now sessions 7 have such blocks." in not_executed
    (other, _) = hints(info_with(MissCount(MissReason.OTHER_SCOPE, 1, 16)), replace(FACTS, scopes=scopes))
    assert "Weights versions in use: none, v2. Tokens with different salts share nothing." in other


def test_a_pool_without_misses_or_without_caching() -> None:
    (limit,) = hints(info_with(), FACTS)
    assert limit == "Hits are multiples of 16 tokens. Prompts of up to 16 tokens never hit."
    info = info_with()
    assert "does not cache" in hints(replace(info, config=replace(info.config, enable_caching=False)), FACTS)[0]


def test_the_end_of_a_group_names_block_tokens_and_what_is_known() -> None:
    assert end_sentence(GroupId(1), GroupEnd(64, 64, 16)) == "group 1 has all 64 tokens that a hit can cover"
    end = GroupEnd(32, 64, 16, 2, MissReason.OTHER_SCOPE, ("", "v2"), is_in_other_namespace=True)
    assert end_sentence(GroupId(0), end) == (
        "group 0 lacks block 2, tokens 32 to 47: cached under another weights version or namespace; "
        "weights versions none, v2 have it; another namespace has it"
    )
    filling = GroupEnd(32, 64, 16, 2, MissReason.NOT_EXECUTED, filling_session_number=7)
    assert end_sentence(GroupId(0), filling).endswith("; session 7 fills it")
