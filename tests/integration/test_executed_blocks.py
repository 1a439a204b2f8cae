"""Blocks that decodes fill: other sessions of a real server find them once their step is executed."""

from kvpool.client import connect
from support.server import pool_config, running_server

PROMPTS = ([1] * 8, [2] * 7)
"""In blocks of 4 tokens: the first needs a block with its next token, the second fills one."""


def test_blocks_filled_by_decodes_are_hit_after_execution() -> None:
    with running_server() as address, connect(address) as client:
        client.create_pool(pool_config())
        session, other = client.open_session("m"), client.open_session("m")
        requests = [session.request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        for request in requests:
            session.admit(request)
        with session.step() as step:
            step.decode(requests, [3, 3])
        assert client.get_pool("m").cached_blocks == 4
        assert other.get_computed_blocks(other.request("before", [*requests[1].token_ids, 0])).num_tokens == 0
        session.mark_executed()
        assert other.get_computed_blocks(other.request("after", [*requests[1].token_ids, 0])).num_tokens == 8
