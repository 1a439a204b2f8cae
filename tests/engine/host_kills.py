"""Kills what takes part in copies between the tiers of a pool, in the middle of copies, and compares all blocks."""

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.halfway import BACKGROUND, DEMOTION, HALVED, PROMOTION, standing_still
from engine.lent_blocks import computed_blocks, wrong_blocks
from engine.load import drawn
from engine.service import Service, service
from engine.serving import AHEAD, BESIDE, Answer, ServedEngine, Site, site
from kvpool.client import Client, connect
from support.waiting import wait_until

NUM_BLOCKS, ALL_BLOCKS = 48, 600
"""Blocks of the first tier, a tenth of what the prompts need; and memory for all."""
HOST_MEMORY = "19MiB"
"""304 blocks: less than all, so that copies there do not end."""
NUM_PROMPTS, NUM_ASKED, ANSWER_TOKENS = 80, 16, 16
WAIT_SECONDS = 60.0
ENGINE, CORE, SERVICE, WORKER = VICTIMS = ("all of an engine", "core of an engine", "service", "worker that lends")
ANY = "any time"
MOMENTS = (DEMOTION, PROMOTION, BACKGROUND, DEMOTION, ANY)
"""Five, so that each victim meets each of them."""


class HostKills:
    """Two engines on both tiers. The first, or what both need, is killed; the second is the next first."""

    def __init__(self, server: Service, place: Site, client: Client) -> None:
        """Starts the engines, and finds what vLLM alone answers and what the blocks must contain."""
        self._server, self._place, self._client = server, place, client
        self._draw = random.Random(7)
        self._num_asked = 0
        self._compared = Counter[str]()
        systems = [drawn(self._draw, 128) for _ in range(4)]
        self._prompts = [systems[i % 4] + drawn(self._draw, self._draw.randint(100, 240)) for i in range(NUM_PROMPTS)]
        expected = place.of_vllm_alone(self._prompts, ANSWER_TOKENS)
        self._tokens = {tuple(each.prompt): each.tokens for each in expected}
        self._contents = computed_blocks(place, [[*each.prompt, *each.tokens] for each in expected], ALL_BLOCKS)
        place.attached = AHEAD | HALVED | {"max_num_seqs": 2}  # so that blocks are free for some steps, and copied
        self._first, self._second = place.engines(2, **BESIDE)

    def run(self, count: int) -> dict[str, Any]:
        """Kills this number of times. After each one tokens, free blocks and the contents of all blocks are checked."""
        began = time.monotonic()
        kills = {victim: dict.fromkeys(MOMENTS, 0) for victim in VICTIMS}
        for turn in range(count):
            victim = VICTIMS[turn % len(VICTIMS)]
            moment = self._kill(victim, MOMENTS[turn % len(MOMENTS)], is_alone=turn // len(VICTIMS) % 2 == 0)
            kills[victim][moment] += 1
            print(f"{turn + 1}: {victim}, {moment}, {time.monotonic() - began:.0f} s", flush=True)
        seconds = round((time.monotonic() - began) / count, 1)
        return {"kills": count, "seconds per kill": seconds, **kills, "blocks compared": dict(self._compared)}

    def _kill(self, victim: str, moment: str, *, is_alone: bool) -> str:
        """Kills in the middle of a copy, or at any time, while the second engine works, too, or does nothing.

        Returns: The moment; ANY if no such copy came.
        """
        self._second.wait_ready()
        prompts = self._draw.sample(self._prompts, NUM_ASKED)
        answers = self._ask(self._first, prompts)
        others = [] if is_alone else self._ask(self._second, self._draw.sample(prompts, NUM_ASKED))
        self._first.wait_for_steps(self._first.num_steps + self._draw.randint(1, 60))
        with self._at(moment, answers) as is_met:
            self._second.wait(*others[: NUM_ASKED // 2])  # so that it takes or hits blocks of these copies
            if victim == SERVICE:
                self._server.kill()
            elif victim == WORKER:
                self._place.lender.kill()
            else:
                if victim == ENGINE:
                    self._first.signal(signal.SIGKILL)
                self._first.process.kill()
                self._first.process.wait(WAIT_SECONDS)  # then its worker, which ends with it, does not go on
        if victim == SERVICE:
            self._server.restart()
        elif victim == WORKER:
            self._place.lender = self._place.start_lender()
        else:
            if is_alone:
                self.compare()  # before another step
            self._first.kill()  # what is left of it
            self._first, self._second = self._second, self._place.engine(**BESIDE)
            answers, others = others, []
        self._check(self._first, answers)
        self._check(self._second, others)
        self._check(self._first, self._ask(self._first, prompts))
        self.compare()
        return moment if is_met else ANY

    @contextmanager
    def _at(self, moment: str, answers: Sequence[Answer]) -> Iterator[bool]:
        """Waits until the first engine is in the middle of a copy, and keeps it there; yields whether it is."""
        if moment == ANY:
            time.sleep(self._draw.random() / 50)  # an arbitrary instant within a step
            yield False
            return
        process, address = self._first.process, self._place.memory.replace("{rank}", "0")

        def has_ended() -> bool:
            return process.poll() is not None or all(each.is_finished for each in answers)

        with standing_still(address, moment, process.pid, has_ended) as stands:
            yield stands

    def _ask(self, engine: ServedEngine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        self._num_asked += 1
        return [engine.ask(f"{self._num_asked}-{i}", prompt, ANSWER_TOKENS) for i, prompt in enumerate(prompts)]

    def _check(self, engine: ServedEngine, answers: Sequence[Answer]) -> None:
        engine.wait(*answers)
        wrong = [each for each in answers if each.tokens != self._tokens[tuple(each.prompt)]]
        assert not wrong, f"tokens of {len(wrong)} requests differ from those of vLLM alone"

    def _is_quiet(self) -> bool:
        pool = self._client.get_pool(self._place.pool)
        return pool.free_blocks == NUM_BLOCKS - 1 and not pool.host_memory.used_blocks

    def compare(self) -> None:
        """Waits until all blocks are free; then fails if a cached block of either tier has wrong contents."""
        wait_until(self._is_quiet, "blocks are not free again", WAIT_SECONDS)
        wrong, compared = wrong_blocks(self._place, self._contents)
        assert not wrong, f"blocks with wrong contents: {wrong}"
        self._compared += compared


@contextmanager
def host_kills() -> Iterator[tuple[HostKills, Site]]:
    """Starts what is to be killed, on a service with a journal."""
    with (
        TemporaryDirectory() as folder,
        service(Path(folder), "--journal", f"{folder}/journal") as server,
        site(server.address, NUM_BLOCKS, lender_flags=("--host-memory", HOST_MEMORY)) as place,
        connect(server.address) as client,
    ):
        yield HostKills(server, place, client), place
