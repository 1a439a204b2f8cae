"""Requests of one of several engines at once: some begin as those of the other engines do, and some are aborted."""

import random
from collections.abc import Mapping, Sequence

from engine.models import VOCABULARY
from engine.serving import Answer, ServedEngine, Site

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


def of_vllm_alone(place: Site, options: Mapping[str, object], loads: Sequence[Load]) -> dict[str, list[int]]:
    """Tokens that vLLM generates without kvpool, in memory that suffices for all requests."""
    engine = place.engine(is_attached=False, num_blocks=600, options=options)
    answers = {name: answer for load in loads for name, answer in load.ask(engine).items()}
    engine.wait(*answers.values())
    engine.stop()
    return tokens(answers)
