"""The sentences of `kvpool explain`."""

import pytest

from kvpool.cli.explain import MEANINGS, end_sentence
from kvpool.core.ids import GroupId
from kvpool.v1.admin_pb2 import GroupEnd
from kvpool.v1.pool_pb2 import MissReason


@pytest.mark.parametrize("reason", MissReason.values()[1:])
def test_each_reason_has_a_meaning(reason: MissReason.ValueType) -> None:
    assert MEANINGS[reason]


def test_the_end_of_a_group_names_block_tokens_and_what_is_known() -> None:
    complete = GroupEnd(num_tokens=64, max_tokens=64, span_tokens=16)
    assert end_sentence(GroupId(1), complete) == "group 1 has all 64 tokens that a hit can cover"
    end = GroupEnd(num_tokens=32, max_tokens=64, span_tokens=16, missing_block=2)
    end.reason = MissReason.MISS_REASON_OTHER_SCOPE
    end.weights_versions.extend(["", "v2"])
    end.is_in_other_namespace = True
    assert end_sentence(GroupId(0), end) == (
        "group 0 lacks block 2, tokens 32 to 47: cached under another weights version or namespace; "
        "weights versions none, v2 have it; another namespace has it"
    )
    end.reason, end.filling_session_number = MissReason.MISS_REASON_NOT_EXECUTED, 7
    assert end_sentence(GroupId(0), end).endswith("; session 7 fills it")
