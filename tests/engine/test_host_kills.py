"""What takes part in copies between two tiers is killed in the middle of them; see host_kills.py."""

import pytest

from engine.host_kills import ANY, MOMENTS, VICTIMS, host_kills
from engine.lent_blocks import FIRST, HOST, cached_blocks

NUM_KILLS = 6


@pytest.mark.slow
@pytest.mark.timeout(600)  # fails earlier with a message, but for a bug of this test
def test_no_kill_in_the_middle_of_a_copy_leaves_a_wrong_block_or_a_block_in_use() -> None:
    with host_kills() as (killing, place):
        found = killing.run(NUM_KILLS)
        kills = [found[victim] for victim in VICTIMS]
        assert [sum(each.values()) for each in kills] == [2, 2, 1, 1]
        assert sum(each[moment] for each in kills for moment in set(MOMENTS) - {ANY}) >= 2
        assert min(found["blocks compared"][tier] for tier in (FIRST, HOST)) > NUM_KILLS
        killing.compare()
        block, contents = next(each for each in cached_blocks(place) if each[0].in_host_memory)
        contents[-1, -1] += 1
        with pytest.raises(AssertionError, match=rf"wrong contents: \[{block.block_id}\]"):
            killing.compare()
