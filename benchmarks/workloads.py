"""The work that is timed, the same for kvpool and for vLLM's manager.

This file also runs under the interpreter that has vLLM, which need not have kvpool: it imports the standard library
only.

1. Only calls of the target are timed. What a scheduler gets from elsewhere (token ids) is there before.
2. Every round leaves the target as it found it, but for what is cached and for what running requests grew by.
3. Work that turns out other than meant (a hit where a miss was to be timed) raises `WorkloadError`: no figure is better
   than one of something else.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, ParamSpec, Protocol, TypeVar

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65_536
WINDOW_TOKENS = 1024
PROMPT_BLOCKS = 256
VOCABULARY = 100_000
_FILLER_BLOCKS = 2048

Micros = dict[str, list[float]]
"""By figure: what each time took, in microseconds."""

NewBlocks = Sequence[Sequence[int]]
"""New block ids, group by group."""

RequestT = TypeVar("RequestT")
HitT = TypeVar("HitT")
_ResultT = TypeVar("_ResultT")
_Parameters = ParamSpec("_Parameters")


class WorkloadError(RuntimeError):
    """The work did not turn out as it was meant."""


@dataclass(frozen=True)
class Task:
    """What is to be done; goes as JSON to another interpreter.

    Attributes:
        kind: Which work: a key of `WORKLOADS`.
        num_blocks: Blocks of the pool.
        num_windowed_groups: Groups with a sliding window of WINDOW_TOKENS, beside one of full attention.
        num_requests: Running requests, for decodes.
        prompt_blocks: Full blocks of each prompt.
        hash_name: The hash that vLLM uses, by vLLM's name; kvpool's is always sha256_cbor.
    """

    kind: str
    num_blocks: int = 100_000
    num_windowed_groups: int = 0
    num_requests: int = 256
    prompt_blocks: int = PROMPT_BLOCKS
    hash_name: str = "sha256_cbor"

    @property
    def num_groups(self) -> int:
        """Groups of the pool."""
        return 1 + self.num_windowed_groups


class Target(Protocol[RequestT, HitT]):
    """A manager of KV-cache blocks, as a scheduler calls it."""

    def hashing(self, token_ids: list[int]) -> Callable[[], object]:
        """Makes what hashes the full blocks of these tokens, and does nothing else."""

    def make(self, token_ids: list[int]) -> RequestT:
        """Makes a request; its full blocks are hashed."""

    def lookup(self, request: RequestT) -> HitT:
        """Finds its longest cached prefix."""

    def num_hit_tokens(self, hit: HitT) -> int:
        """Length of a prefix that was found."""

    def allocate(self, request: RequestT, num_new_tokens: int, hit: HitT | None = None) -> NewBlocks | None:
        """Makes room for tokens beyond the hit, and caches blocks that become full; None if there is none."""

    def serve(self, token_ids: list[int]) -> RequestT:
        """Makes a request and makes room for all of it beyond what is cached, in the way that is fastest."""

    def free(self, request: RequestT) -> None:
        """Frees its blocks and forgets it."""

    def decode(self, requests: Sequence[RequestT], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
        """Gives each running request one more token, and room for it; tells each one's new blocks."""

    def settle(self) -> None:
        """Says that all that was allocated has been computed."""

    def reset(self) -> None:
        """Forgets all that is cached."""

    def close(self) -> None:
        """Gives everything back."""


class Workload(Protocol):
    """Work that is done again and again."""

    def round(self, count: int) -> Micros:
        """Does it so many times."""

    def close(self) -> None:
        """Gives everything back."""


class Stopwatch:
    """Takes times.

    Attributes:
        micros: What it took so far.
    """

    def __init__(self) -> None:
        self.micros: Micros = {}

    def time(
        self, name: str, work: Callable[_Parameters, _ResultT], *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _ResultT:
        """Calls `work`, and adds what it took to a figure."""
        start_ns = time.perf_counter_ns()
        result = work(*args, **kwargs)
        self.micros.setdefault(name, []).append((time.perf_counter_ns() - start_ns) / 1000)
        return result


class _Repeated(Generic[RequestT, HitT]):
    """Work on one target, and what all kinds of it have in common."""

    def __init__(self, target: Target[RequestT, HitT], task: Task) -> None:
        self._target = target
        self._task = task
        self._random = random.Random(0)  # noqa: S311 - a workload
        self._watch = Stopwatch()
        self._set_up()

    def round(self, count: int) -> Micros:
        self._watch = Stopwatch()
        for _ in range(count):
            self._once()
        return self._watch.micros

    def close(self) -> None:
        self._target.close()

    def _set_up(self) -> None:
        pass

    def _once(self) -> None:
        raise NotImplementedError

    def _prompt(self, num_blocks: int, num_more_tokens: int = 1) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=num_blocks * BLOCK_SIZE + num_more_tokens)

    def _expect_hit(self, hit: HitT, num_tokens: int) -> None:
        found = self._target.num_hit_tokens(hit)
        if found != num_tokens:
            raise WorkloadError(f"{found} tokens were hit, not {num_tokens}")

    def _free(self, request: RequestT) -> None:
        self._target.settle()
        self._target.free(request)


def _had(room: NewBlocks | None, num_blocks: int) -> None:
    """Checks that there was room, and in the first group for so many blocks."""
    if room is None or len(room[0]) != num_blocks:
        raise WorkloadError(f"{'nothing' if room is None else len(room[0])} was allocated, not {num_blocks} blocks")


class Prompts(_Repeated[RequestT, HitT]):
    """Prompts that nothing is cached of, and the same again."""

    def _set_up(self) -> None:
        self._num_cold_blocks = self._task.num_blocks - 1

    def _once(self) -> None:
        target, time_, size = self._target, self._watch.time, self._task.prompt_blocks
        self._have_cold_blocks(2 * (size + 1) + 1)
        prompt = self._prompt(size)
        time_("hash", target.hashing(prompt))
        cold, warm = target.make(prompt), target.make(prompt)
        self._expect_hit(time_(f"lookup_miss_{size}", target.lookup, cold), 0)
        _had(time_(f"allocate_cold_{size}", target.allocate, cold, len(prompt)), size + 1)
        hit = time_(f"lookup_hit_{size}", target.lookup, warm)
        self._expect_hit(hit, size * BLOCK_SIZE)
        _had(time_(f"allocate_hit_{size}", target.allocate, warm, 1, hit), 1)
        self._free(warm)
        time_(f"free_{size}", target.free, cold)
        self._free(time_(f"prompt_{size}_end_to_end", target.serve, self._prompt(size)))

    def _have_cold_blocks(self, count: int) -> None:
        """Forgets what is cached, when there is nothing else left to be taken."""
        if self._num_cold_blocks < count:
            self._target.reset()
            self._num_cold_blocks = self._task.num_blocks - 1
        self._num_cold_blocks -= count


class Evictions(_Repeated[RequestT, HitT]):
    """Prompts for which cached blocks are evicted: all free blocks have a hash."""

    def _set_up(self) -> None:
        left = self._task.num_blocks - 1
        while left > 0:
            size = min(left, _FILLER_BLOCKS)
            self._free(self._target.serve(self._prompt(size, 0)))
            left -= size

    def _once(self) -> None:
        target, size = self._target, self._task.prompt_blocks
        prompt = self._prompt(size, 0)
        request = target.make(prompt)
        self._expect_hit(target.lookup(request), 0)
        _had(self._watch.time(f"allocate_evict_{size}", target.allocate, request, len(prompt)), size)
        target.settle()
        self._watch.time(f"free_evict_{size}", target.free, request)


class Windows(_Repeated[RequestT, HitT]):
    """Cold prompts, where most groups look at a window only."""

    def _once(self) -> None:
        target, time_, size = self._target, self._watch.time, self._task.prompt_blocks
        prompt = self._prompt(size)
        request = target.make(prompt)
        self._expect_hit(time_(f"gemma3_lookup_miss_{size}", target.lookup, request), 0)
        _had(time_(f"gemma3_allocate_{size}", target.allocate, request, len(prompt)), size + 1)
        target.settle()
        time_(f"gemma3_free_{size}", target.free, request)


class Decodes(_Repeated[RequestT, HitT]):
    """Steps in which every running request gets one token; one in BLOCK_SIZE of them crosses into a new block."""

    def _set_up(self) -> None:
        size = self._task.prompt_blocks
        lengths = [(size, i % BLOCK_SIZE) for i in range(self._task.num_requests)]
        self._running = [self._target.serve(self._prompt(*length)) for length in lengths]

    def _once(self) -> None:
        count = self._task.num_requests
        tokens = self._random.choices(range(VOCABULARY), k=count)
        new = self._watch.time(f"decode_step_{count}_requests", self._target.decode, self._running, tokens)
        grown = sum(1 for blocks in new if blocks and any(blocks))
        if grown != count // BLOCK_SIZE:
            raise WorkloadError(f"{grown} of {count} requests crossed into a new block, not one in {BLOCK_SIZE}")


WORKLOADS = {"prompts": Prompts, "evictions": Evictions, "windows": Windows, "decodes": Decodes}


def open_workload(target: Target[RequestT, HitT], task: Task) -> Workload:
    """Makes the target ready for a task."""
    return WORKLOADS[task.kind](target, task)
