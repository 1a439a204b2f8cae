"""Workloads, with one, several and unlimited rounds."""

from itertools import pairwise

import pytest

from kvpool.replay.workload import ChatShare, Work, Workload


def played(workload: Workload, most: int = 1000) -> list[Work]:
    """Plays all requests in order, each with as many output tokens as it asks for."""
    waiting = workload.start()
    done: list[Work] = []
    while waiting and len(done) < most:
        work = waiting.pop(0)
        done.append(work)
        follow_up = workload.follow_up(work, [7] * work.output_length)
        waiting += [follow_up] if follow_up else []
    return done


def test_a_turn_contains_all_earlier_turns() -> None:
    turns = played(ChatShare(1, 0, num_conversations=1, num_turns=4))
    assert len(turns) == 4
    for earlier, later in pairwise(turns):
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert later.token_ids[len(earlier.token_ids) :][: earlier.output_length] == [7] * earlier.output_length


def test_chats_depend_on_seed_and_share_and_system_prompts_on_the_seed() -> None:
    def first_turns(seed: int, index: int) -> list[list[int]]:
        return [work.token_ids for work in ChatShare(seed, index, 40, 1).start()]

    assert first_turns(1, 0) == first_turns(1, 0)
    beginnings = [{tuple(tokens[:200]) for tokens in first_turns(*of)} for of in ((1, 0), (1, 1), (2, 0))]
    assert beginnings[0] == beginnings[1], "four system prompts, whatever the share"
    assert beginnings[0].isdisjoint(beginnings[2])
    assert first_turns(1, 0) != first_turns(1, 1)


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_conversations_follow_each_other_without_repetition(num_rounds: int) -> None:
    done = played(ChatShare(1, 0, num_conversations=2, num_turns=3, num_rounds=num_rounds))
    assert len({work.work_id for work in done}) == len(done) == 2 * 3 * num_rounds
    assert len({tuple(work.token_ids) for work in done}) == len(done)


def test_unlimited_rounds_do_not_end() -> None:
    done = played(ChatShare(1, 0, 2, 3, None), most=200)
    assert len({work.work_id for work in done}) == len(done) == 200
