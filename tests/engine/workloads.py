"""What engines are asked, step by step, so that two of them can be compared.

Requests come before a step of a known number and are aborted before one. All prompts are drawn from the workload's
name: the same name is the same workload in every process.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from engine.models import VOCABULARY

BLOCK_TOKENS = 32
LONGEST_TOKENS = 512
"""Of a request, its prompt and what it generates: max_model_len of the engines."""
CHAT_ANSWER_TOKENS = 40

_SALTS = ("tenant-a", "tenant-b")


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        prompt: Token ids.
        max_tokens: Generated tokens; fewer if it is aborted.
        priority: Lower is served first, where the engine goes by it.
        salt: Keeps the blocks of tenants apart.
        copies: How many answers to the same prompt.
        temperature: 0 is greedy.
        seed: Of sampling.
        prompt_logprobs: Asks for the logprobs of the prompt, which no cached block can tell.
        continues: Index of the request whose prompt and answer come before this prompt.
        arrives: The step before which it is added.
        aborted: The step before which it is aborted.
    """

    prompt: Sequence[int]
    max_tokens: int = 16
    priority: int = 0
    salt: str | None = None
    copies: int = 1
    temperature: float = 0.0
    seed: int | None = None
    prompt_logprobs: int | None = None
    continues: int | None = None
    arrives: int = 0
    aborted: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and the steps before which the prefix cache is reset: with running requests preempted, or without."""

    requests: Sequence[Request]
    resets: Mapping[int, bool] = field(default_factory=dict)

    @property
    def last_event(self) -> int:
        """The last step before which something happens."""
        steps = [step for each in self.requests for step in (each.arrives, each.aborted or 0)]
        return max([*steps, *self.resets], default=0)


_Draw: TypeAlias = random.Random


def _tokens(draw: _Draw, count: int) -> list[int]:
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]


def families(draw: _Draw, prefixes: Sequence[int], requests: int, longest_tail: int) -> list[list[int]]:
    """Prompts that begin with one of a few prefixes of the given lengths."""
    beginnings = [_tokens(draw, length) for length in prefixes]
    return [draw.choice(beginnings) + _tokens(draw, draw.randint(1, longest_tail)) for _ in range(requests)]


def _shared_prefixes(draw: _Draw) -> Workload:
    prompts = families(draw, (40, 96, 100, 200, 256), 100, 120)
    return Workload([Request(each, draw.randint(1, 40), arrives=number // 3) for number, each in enumerate(prompts)])


def _repeats(draw: _Draw) -> Workload:
    """The same prompts again and again; whole blocks, one token less and one more, and less than a block."""
    prompts = [_tokens(draw, length) for length in (5, 31, 32, 33, 63, 64, 65, 128, 250, 320)]
    return Workload([Request(each, 3, arrives=40 * turn) for turn in range(3) for each in prompts])


def _conversations(draw: _Draw) -> Workload:
    """Requests that grow far beyond a window; later ones continue them."""
    prompts = [_tokens(draw, draw.randint(1, 100)) for _ in range(8)]
    longer = [each + _tokens(draw, 150) for each in prompts]
    return Workload(
        [Request(each, 150) for each in prompts]
        + [Request(each, 80, arrives=80 + number) for number, each in enumerate(longer)]
        + [Request(each + each[::-1], 20, arrives=170) for each in longer if len(each) < 240]
    )


def _salts(draw: _Draw) -> Workload:
    """Two tenants, and one without a salt, with equal prompts."""
    prompts = [_tokens(draw, length) for length in (64, 100, 161, 200)]
    return Workload(
        [
            Request(prompt, 4, salt=salt, arrives=30 * turn + 5 * number)
            for turn in range(3)
            for number, salt in enumerate((*_SALTS, None))
            for prompt in prompts
        ]
    )


def _copies(draw: _Draw) -> Workload:
    """Three answers to each prompt; drawn with a seed, as vLLM gives greedily only one."""
    prompts = families(draw, (70, 128), 16, 60)
    return Workload(
        [
            Request(each, 12, copies=3, temperature=0.8, seed=number, arrives=number)
            for number, each in enumerate(prompts)
        ]
    )


def _prompt_logprobs(draw: _Draw) -> Workload:
    """Prompts that are in the cache, every other one read again in full."""
    prompts = [_tokens(draw, length) for length in (64, 100, 150)]
    return Workload(
        [
            Request(each, 4, prompt_logprobs=0 if turn % 2 else None, arrives=10 * turn)
            for turn in range(4)
            for each in prompts
        ]
    )


def _batch_sizes(draw: _Draw) -> Workload:
    """1, 2, 4, ..., 64 requests at once."""
    sizes = [1 << power for power in range(7)]
    prompts = families(draw, (48, 64), sum(sizes), 32)
    arrivals = [25 * number for number, size in enumerate(sizes) for _ in range(size)]
    return Workload([Request(each, 8, arrives=step) for each, step in zip(prompts, arrivals, strict=True)])


def _aborts(draw: _Draw) -> Workload:
    """Half of the requests are aborted: while they wait, in their prefill, in a decode, or after their end."""
    prompts = families(draw, (64, 130), 40, 150)
    requests = [Request(each, 24, arrives=number // 2) for number, each in enumerate(prompts)]
    return Workload(
        [
            replace(each, aborted=each.arrives + draw.choice((0, 1, 2, 5, 12, 30))) if number % 2 else each
            for number, each in enumerate(requests)
        ]
    )


def _reset(draw: _Draw) -> Workload:
    """A reset when nothing runs, one that is refused as requests run, and one that preempts them."""
    prompts = families(draw, (64, 100), 8, 60)
    return Workload(
        [Request(each, 30, arrives=start + number) for start in (0, 10, 80) for number, each in enumerate(prompts)],
        {0: False, 12: False, 25: True, 88: True},
    )


def _long_prompts(draw: _Draw) -> Workload:
    """Prompts of many chunks, beside short ones, where an engine computes few tokens per step."""
    prompts = families(draw, (33, 160, 224), 24, 200)
    short = [_tokens(draw, draw.randint(1, 30)) for _ in range(24)]
    both = [each for pair in zip(prompts, short, strict=True) for each in pair]
    return Workload([Request(each, 12, arrives=2 * number) for number, each in enumerate(both)])


def _crowded(draw: _Draw) -> Workload:
    """More than a small pool has room for; all grow until requests are preempted."""
    prompts = families(draw, (32, 64, 96), 60, 60)
    return Workload([Request(each, draw.randint(20, 120), arrives=number) for number, each in enumerate(prompts)])


def _crowded_aborts(draw: _Draw) -> Workload:
    """As crowded, and some are aborted, also while they are preempted; a reset preempts the rest once."""
    requests = [
        replace(each, aborted=each.arrives + draw.randint(1, 150)) if draw.random() < 0.4 else each
        for each in _crowded(draw).requests[:40]
    ]
    return Workload(requests, {60: True})


def _chat(draw: _Draw) -> Workload:
    """Chats of three turns, each the next message after the earlier prompt and its answer."""
    firsts = (40, 64, 100, 160, 224, 300)
    turns = [[_tokens(draw, length) for length in firsts]] + [
        [_tokens(draw, draw.randint(5, 30)) for _ in firsts] for _ in range(2)
    ]
    return Workload(
        [
            Request(
                message,
                CHAT_ANSWER_TOKENS,
                arrives=100 * turn,
                continues=(turn - 1) * len(firsts) + chat if turn else None,
            )
            for turn, messages in enumerate(turns)
            for chat, message in enumerate(messages)
        ]
    )


def _priorities(draw: _Draw) -> Workload:
    """As crowded, where who comes later is often served first."""
    return Workload([replace(each, priority=draw.randint(0, 4)) for each in _crowded(draw).requests])


_WORKLOADS: Mapping[str, Callable[[_Draw], Workload]] = {
    "shared prefixes": _shared_prefixes,
    "repeats": _repeats,
    "conversations": _conversations,
    "salts": _salts,
    "copies": _copies,
    "prompt logprobs": _prompt_logprobs,
    "batch sizes": _batch_sizes,
    "aborts": _aborts,
    "reset": _reset,
    "long prompts": _long_prompts,
    "crowded": _crowded,
    "crowded aborts": _crowded_aborts,
    "priorities": _priorities,
    "chat": _chat,
}


def make_workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        KeyError: There is none.
    """
    return _WORKLOADS[name](random.Random(name))
