"""A scheduler process that works while its server is attacked, and times its rounds.

`python tenant.py ADDRESS POOL`, with TLS and token from the environment. Works until stdin closes, then prints one line
of JSON. See `Tenant` in target.py.
"""

import json
import select
import sys
import time
from typing import Any, Final

from kvpool.client import KvpoolError, connect
from support.server import pool_config

PAUSE_SECONDS: Final = 0.02
"""Time between two rounds."""
_NUM_BLOCKS: Final = 64


def main() -> None:
    """Works until stdin closes."""
    address, pool = sys.argv[1:]
    rounds: list[tuple[float, float]] = []
    error = ""
    try:
        with connect(address, deadline_seconds=60) as client:
            client.create_pool(pool_config(pool, _NUM_BLOCKS))
            with client.open_session(pool) as session:
                print("working", flush=True)  # noqa: T201 - the parent reads it
                while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
                    started = time.monotonic()
                    work(session, len(rounds))
                    rounds.append((started, time.monotonic() - started))
    except (KvpoolError, AssertionError) as met:
        error = f"{type(met).__name__}: {met}"
    print(json.dumps({"error": error, "rounds": rounds}))  # noqa: T201 - the parent reads it


def work(session: Any, number: int) -> None:
    """A round: admits, decodes and frees a request whose prompt is cached after round 0."""
    request = session.request(f"r{number}", range(16))
    admitted = session.admit(request)
    num_hit = 12 if number else 0
    assert (admitted.num_hit_tokens, admitted.num_new_tokens) == (num_hit, 16 - num_hit), admitted
    request.append([number])
    assert session.allocate_slots(request, 1) is not None
    assert len({block_id for table in request.block_ids for block_id in table}) == 5
    session.free(request)


if __name__ == "__main__":
    main()
