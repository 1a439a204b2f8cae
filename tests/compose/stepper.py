"""A scheduler that steps through all servers of a shard until its input ends. A test runs it in a container.

It prints a JSON line when it begins to step, and another when it has ended.
"""

import json
import select
import sys
import time
from collections.abc import Sequence

from kvpool.client import Session, connect

POOL = "demo"
PACE_SECONDS = 0.01


def main(address: str) -> None:
    """Steps until the input ends; then checks that the server still holds the request."""
    with connect(address, deadline_seconds=60) as client:
        session = client.open_session(POOL, client_name="stepper", min_blocks=8)  # others cannot take them
        request = session.request("r", token_ids=[session.session_number] * 40)
        assert session.allocate_slots(request, 40), "the pool is full"
        report(session, request.block_ids)
        num_steps, longest_seconds, is_last = 0, 0.0, False
        while not is_last:
            is_last = bool(select.select([sys.stdin], [], [], PACE_SECONDS)[0])  # one more step after the input's end
            longest_seconds = max(longest_seconds, step(session))
            num_steps += 1
        assert session.sequence > num_steps, "each step was sent"
        num_blocks = [len(table) for table in request.block_ids]
        assert session.get_common_prefix_blocks(request) == num_blocks, "the server holds the request"
        session.close()
        report(session, request.block_ids, steps=num_steps, longest_seconds=longest_seconds)


def step(session: Session) -> float:
    """Admits another request and frees it; returns how long that took."""
    start_seconds = time.monotonic()
    other = session.request("other", token_ids=range(16))
    assert session.admit(other), "the pool is full"
    session.free(other)
    return time.monotonic() - start_seconds


def report(session: Session, block_ids: Sequence[Sequence[int]], **more: float) -> None:
    """Prints the session, the blocks of its request, and more."""
    seen = {"session": session.session_number, "epoch": session.epoch, "blocks": block_ids, **more}
    print(json.dumps(seen), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(sys.argv[1])
