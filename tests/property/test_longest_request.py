"""In any mix of groups, a pool is refused only if a request of maximum length cannot hold its blocks."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from kvpool.core.specs.longest_request import most_held_blocks, shortfall
from kvpool.core.specs.pool_config import PoolConfig
from property.mixes import configs
from support.core import num_allocated


@given(config=configs(), num_in_flight=st.sampled_from([0, 1, 5, 20, 64, 100]))
def test_a_refused_pool_holds_no_request_of_maximum_length(config: PoolConfig, num_in_flight: int) -> None:
    config = replace(config, max_in_flight_tokens=num_in_flight)
    needed, reserved = most_held_blocks(config, config.max_model_len), 1 + sum(config.num_sink_blocks)
    assert not shortfall(replace(config, num_blocks=needed + reserved))
    assume(needed > 1)
    refused = replace(config, num_blocks=needed - 1 + reserved)
    assert shortfall(refused)
    assert num_allocated(refused) < config.max_model_len
