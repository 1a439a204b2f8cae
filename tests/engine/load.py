"""Requests of one of several engines at once: some begin as those of the other engines do, and some are aborted."""

import random
from collections.abc import Mapping, Sequence

from engine.models import VOCABULARY
from engine.serving import SLOW, Answer, ServedEngine, Site

ENDS = range(3, VOCABULARY, 40)
"""Tokens that end a request: the step after it has been launched by then."""


class Load:
    """Requests of one engine: a third begin as those of the other engine do, and some are aborted."""

    def __init__(self, name: str, count: int) -> None:
        draw, common = random.Random(name), random.Random(0)
        heads = [[common.randrange(3, VOCABULARY) for _ in range(96)] for _ in range(3)]
        self._requests = {
            f"{name}-{i}": (
                (draw.choice(heads) if draw.random() < 0.3 else [])
                + [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 180))],
                draw.randint(1, 120),
            )
            for i in range(count)
        }
        self._aborted = {each: draw.randint(1, 40) for each in self._requests if draw.random() < 0.05}

    @property
    def names(self) -> list[str]:
        """Its requests."""
        return list(self._requests)

    def ask(self, engine: ServedEngine, names: Sequence[str] = ()) -> dict[str, Answer]:
        """Sends some requests at once, or all."""
        return {name: engine.ask(name, *self._requests[name], ENDS) for name in names or self._requests}

    def abort_some(self, engine: ServedEngine, answers: dict[str, Answer]) -> None:
        """Aborts a few requests, each after some steps, and forgets those that had not ended."""
        for name, num_steps in sorted(self._aborted.items(), key=lambda each: each[1]):
            engine.wait_for_steps(num_steps)
            engine.abort(name)
            answers.pop(name)


def tokens(answers: Mapping[str, Answer]) -> dict[str, list[int]]:
    """Generated tokens of each request."""
    return {name: answer.tokens for name, answer in answers.items()}


def answer_at_once_as_vllm_alone(place: Site, options: Mapping[str, object], loads: Sequence[Load]) -> None:
    """Checks the tokens of as many engines on the lent memory as there are loads. Their steps run late."""
    expected = of_vllm_alone(place, options, loads)
    engines = place.engines(len(loads), options={**options, **SLOW})
    asked = [load.ask(engine) for load, engine in zip(loads, engines, strict=True)]
    for load, engine, answers in zip(loads, engines, asked, strict=True):
        load.abort_some(engine, answers)
    for engine, answers in zip(engines, asked, strict=True):
        engine.wait(*answers.values())
        found = tokens(answers)
        assert found == {name: expected[name] for name in found}


def of_vllm_alone(place: Site, options: Mapping[str, object], loads: Sequence[Load]) -> dict[str, list[int]]:
    """Tokens that vLLM generates without kvpool, in memory that suffices for all requests."""
    engine = place.engine(is_attached=False, num_blocks=600, options=options)
    answers = {name: answer for load in loads for name, answer in load.ask(engine).items()}
    engine.wait(*answers.values())
    engine.stop()
    return tokens(answers)


class Revisits:
    """Chats of several turns. Each turn is asked in all chats before the next turn. There are three system prompts."""

    def __init__(
        self, num_chats: int, num_turns: int = 3, *, num_at_once: int = 6, question_tokens: int = 90, seed: int = 2
    ) -> None:
        self._num_chats, self._num_turns, self._num_at_once = num_chats, num_turns, num_at_once
        self._question_tokens, self._seed = question_tokens, seed

    def run(self, *engines: ServedEngine, answer_tokens: int = 16, name: str = "") -> list[list[Answer]]:
        """Asks all turns, each chat one of the engines; returns the answers of each turn.

        The names of the requests begin with `name`.
        """
        draw = random.Random(self._seed)
        systems = [drawn(draw, 128) for _ in range(3)]
        chats = [draw.choice(systems)[:] for _ in range(self._num_chats)]
        turns: list[list[Answer]] = []
        for turn in range(self._num_turns):
            answers: list[Answer] = []
            for first in range(0, self._num_chats, self._num_at_once):
                asked = []
                for i in range(first, min(first + self._num_at_once, self._num_chats)):
                    chats[i] = chats[i] + drawn(draw, draw.randint(*self._question_range))
                    engine = engines[(i + turn) % len(engines)]
                    asked.append((i, engine, engine.ask(f"{name}{turn}-{i}", chats[i], answer_tokens)))
                for i, engine, answer in asked:
                    engine.wait(answer)
                    chats[i] = [*chats[i], *answer.tokens]
                    answers.append(answer)
            turns.append(answers)
        return turns

    @property
    def _question_range(self) -> tuple[int, int]:
        return 2 * self._question_tokens // 3, 4 * self._question_tokens // 3


def drawn(draw: random.Random, count: int) -> list[int]:
    """Random tokens."""
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]


def hit_rate(answers: Sequence[Answer]) -> float:
    """Share of the prompts' tokens that were cached."""
    return sum(each.cached_tokens for each in answers) / sum(len(each.prompt) for each in answers)
