"""An engine on lent memory: started by `engines.Engine`.

It reads from stdin, one JSON object per line, prompts to generate for, and answers each with one line of JSON.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from examples.reference_engine.config import ReferenceConfig
from examples.reference_engine.deployment import Deployment, running_ranks
from examples.reference_engine.prompts import Prompts
from examples.reference_engine.rank import START_SECONDS
from examples.reference_engine.step_link import StepLink
from kvpool.client import Request, Session, connect
from kvpool.replay.executor import Scheduled
from kvpool.replay.scheduler import Scheduler

POOL = "m"
CONFIG = ReferenceConfig(
    num_layers=8,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    intermediate_size=1024,
    vocab_size=1024,
    block_size=16,
)
NUM_BLOCKS = 1000
MAX_TOKENS = 4096
MAX_RUNNING = 8
MAX_STEP_TOKENS = 512


def deployment(device: str, memory: str) -> Deployment:
    """One rank on lent memory."""
    return Deployment(
        CONFIG,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_TOKENS,
        num_schedulers=1,
        max_num_seqs=MAX_RUNNING,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        device=device,
        memory=memory,
    )


class Timed:
    """Runs rounds on the ranks, and notes when tokens come.

    Attributes:
        first_token_at: When the first token came, as `time.monotonic` says it to all processes; 0 if none came.
        longest_gap_seconds: The longest time between two rounds.
    """

    def __init__(self, link: StepLink) -> None:
        self._link = link
        self._last = time.monotonic()
        self.first_token_at = 0.0
        self.longest_gap_seconds = 0.0

    def execute(self, scheduled: Sequence[Scheduled], released: Iterable[Request]) -> Sequence[int]:
        """See `Executor`."""
        tokens = self._link.execute(scheduled, released)
        now = time.monotonic()
        self.longest_gap_seconds = max(self.longest_gap_seconds, now - self._last)
        self._last = now
        if tokens and not self.first_token_at:
            self.first_token_at = now
        return tokens


def generate(session: Session, link: StepLink, work: Prompts) -> dict[str, object]:
    """Generates for all prompts at once."""
    timed = Timed(link)
    start = time.monotonic()
    counts = Scheduler(
        session, work, max_num_seqs=MAX_RUNNING, max_num_batched_tokens=MAX_STEP_TOKENS, executor=timed
    ).run()
    return {
        **asdict(counts),
        "outputs": work.outputs,
        "first_token_at": timed.first_token_at,
        "first_token_ms": 1000 * (timed.first_token_at - start),
        "longest_gap_ms": 1000 * timed.longest_gap_seconds,
    }


def main(server: str, memory: str, device: str) -> None:
    """Maps the memory, opens a session, and generates until stdin ends."""
    with (
        connect(server, deadline_seconds=60) as client,
        running_ranks(server, POOL, deployment(device, memory)) as ranks,
    ):
        client.wait_until_ready(POOL, timeout_seconds=START_SECONDS)
        with (
            client.open_session(POOL, client_name="engine", lease_seconds=60) as session,
            StepLink.of_session(ranks.socket, ranks.authkey, session) as link,
        ):
            answer({"epoch": session.epoch})
            for line in sys.stdin:
                work = json.loads(line)
                answer(generate(session, link, Prompts(work["prompts"], work["output_tokens"])))


def answer(value: object) -> None:
    """Writes one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
