"""A scheduler that steps through all servers of a shard until its input ends. A test runs it in a container.

It prints a JSON line when it begins to step, and another when it has ended.
"""

import json
import select
import sys
import time
from collections.abc import Sequence

from kvpool.client import Request, Session, connect

POOL = "demo"
PACE_SECONDS = 0.01


def main(address: str) -> None:
    """Steps on one request, each time for one more token; then resumes the session to see what the server holds."""
    with connect(address, deadline_seconds=60) as client:
        session = client.open_session(POOL, client_name="stepper")
        request = session.request("r", token_ids=[session.session_number] * 40)
        assert session.allocate_slots(request, 40), "the pool is full"
        report(session, request.block_ids)
        num_steps, longest_seconds, is_last = 0, 0.0, False
        while not is_last:
            is_last = bool(select.select([sys.stdin], [], [], PACE_SECONDS)[0])  # one more step after the input's end
            longest_seconds = max(longest_seconds, step(session, request))
            num_steps += 1
        with client.resume_session(session.session_id, sequence=session.sequence) as resumed:
            (held,) = resumed.held_requests
            assert (held.request_id, held.number) == (request.request_id, request.number)
            assert [list(table) for table in held.block_ids] == request.block_ids
        report(session, request.block_ids, steps=num_steps, longest_seconds=longest_seconds)


def step(session: Session, request: Request) -> float:
    """Takes a step; returns how long it took."""
    start_seconds = time.monotonic()
    with session.step(executed_sequence=session.sequence) as builder:
        decodes = builder.decode([request], token_ids=[7])
    assert not decodes.refused, "the pool is full"
    return time.monotonic() - start_seconds


def report(session: Session, block_ids: Sequence[Sequence[int]], **more: float) -> None:
    """Prints the session, the blocks of its request, and more."""
    seen = {"session": session.session_number, "epoch": session.epoch, "blocks": block_ids, **more}
    print(json.dumps(seen), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(sys.argv[1])
