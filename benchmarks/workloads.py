"""The timed workloads, the same for kvpool and for vLLM's manager.

This file also runs under the interpreter with vLLM, which need not have kvpool. It imports the standard library only.

1. Only calls of the target are timed. Inputs of a scheduler, such as token ids, are made before.
2. A round leaves the target as it was, except for cached blocks and the growth of running requests.
3. Unintended work (a hit where a miss is to be timed) raises `WorkloadError`, so that no wrong figure is reported.
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
"""Times in microseconds, by name of the figure."""

NewBlocks = Sequence[Sequence[int]]
"""New block ids per group."""

RequestT = TypeVar("RequestT")
HitT = TypeVar("HitT")
_ResultT = TypeVar("_ResultT")
_Parameters = ParamSpec("_Parameters")


class WorkloadError(RuntimeError):
    """A workload did not do the intended work."""


@dataclass(frozen=True)
class Task:
    """Parameters of a workload; sent as JSON to vLLM's interpreter.

    Attributes:
        kind: Kind of work, a key of `WORKLOADS`.
        num_blocks: Blocks of the pool.
        num_windowed_groups: Groups with a sliding window of WINDOW_TOKENS, besides one group of full attention.
        num_requests: Running requests of decodes.
        prompt_blocks: Full blocks per prompt.
        hash_name: vLLM's name of the hash that vLLM uses; kvpool always uses sha256_cbor.
    """

    kind: str
    num_blocks: int = 100_000
    num_windowed_groups: int = 0
    num_requests: int = 256
    prompt_blocks: int = PROMPT_BLOCKS
    hash_name: str = "sha256_cbor"

    @property
    def num_groups(self) -> int:
        """Number of groups of the pool."""
        return 1 + self.num_windowed_groups


class Target(Protocol[RequestT, HitT]):
    """A KV cache manager, as a scheduler calls it."""

    def hashing(self, token_ids: list[int]) -> Callable[[], object]:
        """Returns a function that only hashes the full blocks of these tokens."""

    def make(self, token_ids: list[int]) -> RequestT:
        """Makes a request and hashes its full blocks."""

    def lookup(self, request: RequestT) -> HitT:
        """Looks up the longest cached prefix of a request."""

    def num_hit_tokens(self, hit: HitT) -> int:
        """Returns the length of a hit in tokens."""

    def allocate(self, request: RequestT, num_new_tokens: int, hit: HitT | None = None) -> NewBlocks | None:
        """Allocates slots for tokens after the hit and caches full blocks; None if there are too few blocks."""

    def serve(self, token_ids: list[int]) -> RequestT:
        """Makes a request and allocates slots for all its tokens after the cached prefix, in the fastest way."""

    def free(self, request: RequestT) -> None:
        """Frees the blocks of a request and removes it."""

    def decode(self, requests: Sequence[RequestT], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
        """Appends one token to each running request and allocates slots; returns the new blocks of each."""

    def settle(self) -> None:
        """Reports all allocated blocks as executed."""

    def reset(self) -> None:
        """Drops all cached blocks."""

    def close(self) -> None:
        """Frees all resources."""


class Workload(Protocol):
    """Repeated work."""

    def round(self, count: int) -> Micros:
        """Does the work `count` times."""

    def close(self) -> None:
        """Frees all resources."""


class Stopwatch:
    """Measures times.

    Attributes:
        micros: The times so far.
    """

    def __init__(self) -> None:
        self.micros: Micros = {}

    def time(
        self, name: str, work: Callable[_Parameters, _ResultT], *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _ResultT:
        """Calls `work`, and adds its time to a figure."""
        start_ns = time.perf_counter_ns()
        result = work(*args, **kwargs)
        self.micros.setdefault(name, []).append((time.perf_counter_ns() - start_ns) / 1000)
        return result


class _Repeated(Generic[RequestT, HitT]):
    """Base of all kinds of work on one target."""

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


def _expect_blocks(new: NewBlocks | None, num_blocks: int) -> None:
    """Checks the number of blocks that were allocated in the first group."""
    if new is None or len(new[0]) != num_blocks:
        raise WorkloadError(f"{'no' if new is None else len(new[0])} blocks were allocated, not {num_blocks}")


class Prompts(_Repeated[RequestT, HitT]):
    """Prompts without cached blocks, then the same prompts with hits."""

    def _set_up(self) -> None:
        self._num_cold_blocks = self._task.num_blocks - 1

    def _once(self) -> None:
        target, time_, size = self._target, self._watch.time, self._task.prompt_blocks
        self._ensure_cold_blocks(2 * (size + 1) + 1)
        prompt = self._prompt(size)
        time_("hash", target.hashing(prompt))
        cold, warm = target.make(prompt), target.make(prompt)
        self._expect_hit(time_(f"lookup_miss_{size}", target.lookup, cold), 0)
        _expect_blocks(time_(f"allocate_cold_{size}", target.allocate, cold, len(prompt)), size + 1)
        hit = time_(f"lookup_hit_{size}", target.lookup, warm)
        self._expect_hit(hit, size * BLOCK_SIZE)
        _expect_blocks(time_(f"allocate_hit_{size}", target.allocate, warm, 1, hit), 1)
        self._free(warm)
        time_(f"free_{size}", target.free, cold)
        self._free(time_(f"prompt_{size}_end_to_end", target.serve, self._prompt(size)))

    def _ensure_cold_blocks(self, count: int) -> None:
        """Drops cached blocks if there are too few free blocks without a hash."""
        if self._num_cold_blocks < count:
            self._target.reset()
            self._num_cold_blocks = self._task.num_blocks - 1
        self._num_cold_blocks -= count


class Evictions(_Repeated[RequestT, HitT]):
    """Prompts that evict cached blocks: all free blocks have a hash."""

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
        _expect_blocks(self._watch.time(f"allocate_evict_{size}", target.allocate, request, len(prompt)), size)
        target.settle()
        self._watch.time(f"free_evict_{size}", target.free, request)


class Windows(_Repeated[RequestT, HitT]):
    """Cold prompts in a pool with mostly sliding-window groups."""

    def _once(self) -> None:
        target, time_, size = self._target, self._watch.time, self._task.prompt_blocks
        prompt = self._prompt(size)
        request = target.make(prompt)
        self._expect_hit(time_(f"gemma3_lookup_miss_{size}", target.lookup, request), 0)
        _expect_blocks(time_(f"gemma3_allocate_{size}", target.allocate, request, len(prompt)), size + 1)
        target.settle()
        time_(f"gemma3_free_{size}", target.free, request)


class Decodes(_Repeated[RequestT, HitT]):
    """Steps that append one token to each running request; one in BLOCK_SIZE of them enters a new block."""

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
            raise WorkloadError(f"{grown} of {count} requests entered a new block, not one in {BLOCK_SIZE}")


WORKLOADS = {"prompts": Prompts, "evictions": Evictions, "windows": Windows, "decodes": Decodes}


def open_workload(target: Target[RequestT, HitT], task: Task) -> Workload:
    """Prepares the workload of a task on a target."""
    return WORKLOADS[task.kind](target, task)
