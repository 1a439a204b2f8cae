"""Engines one after the other on lent memory, with other weights or another LoRA in the same files each time."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.drawn_weights import write_adapter, write_weights
from engine.forks import run_program
from engine.lending import attached_to, lenders
from engine.models import LLAMA, write_model
from engine.pairs import Engine

pytestmark = pytest.mark.complete

ENGINE = Engine(LLAMA, 256, (), {"load_format": "auto", "enable_lora": True, "max_lora_rank": 8, "max_loras": 2})


class Loaded(NamedTuple):
    """Seeds of what the files of an engine contain."""

    weights: int
    lora: int


ENGINES = (Loaded(1, 1), Loaded(1, 2), Loaded(2, 2), Loaded(2, 1), Loaded(2, 1), Loaded(1, 1))
IN_PLACE = (3, 4)
"""LoRAs that each engine then loads, one over the other."""
Answers = list[dict[str, Any]]


def _run(folder: Path, name: str, attached: dict[str, Any]) -> Answers:
    """Asks an engine without a LoRA, with that in its files, and with those that it loads in place.

    vLLM alone loads those from a folder each: from one, it answers from the blocks of the LoRA before.
    """
    llm = {**ENGINE.specification(folder / "model")["llm"], **attached}
    in_place = [(f"{folder}/over" if attached else f"{folder}/{seed}", seed) for seed in IN_PLACE]
    specification = {"llm": llm, "loras": [None, (f"{folder}/sql", None), *in_place]}
    found: Answers = run_program("engine.loads_program", specification, folder / name)
    return found


@pytest.fixture(scope="module")
def answers(folder: Path, address: str) -> list[tuple[Answers, Answers]]:
    """What each engine answered on lent memory, and vLLM alone with the same files."""
    memory = f"unix:{folder}/m"
    write_model(LLAMA, folder / "model")
    attached = attached_to(address, "files", memory)
    del attached["additional_config"]["kvpool"]["weights_version"]
    found, alone, written = [], {}, Loaded(0, 0)
    with lenders(address, "files", memory):
        for number, loaded in enumerate(ENGINES):
            if loaded.weights != written.weights:
                write_weights(folder / "model", loaded.weights)
            if loaded.lora != written.lora:
                write_adapter(folder / "sql", LLAMA, loaded.lora)
            written = loaded
            if loaded not in alone:
                alone[loaded] = _run(folder, f"alone-{number}", {})
            found.append((_run(folder, f"lent-{number}", attached), alone[loaded]))
    return found


def test_every_answer_is_that_of_vllm_alone(answers: list[tuple[Answers, Answers]]) -> None:
    for lent, alone in answers:
        assert [each["token_ids"] for each in lent] == [each["token_ids"] for each in alone]
        for each, expected in zip(lent, alone, strict=True):
            assert each["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
    differing = {tuple(each["token_ids"]) for _, alone in answers for each in alone}
    assert len(differing) == 2 + 4 + 2 * len(IN_PLACE), "all weights and LoRAs answer differently"


def test_an_engine_hits_what_was_computed_with_the_same_files_only(answers: list[tuple[Answers, Answers]]) -> None:
    hits = [[bool(each["num_cached_tokens"]) for each in lent] for lent, _ in answers]
    same = [(False, False), (True, False), (False, False), (True, False), (True, True), (False, False)]
    assert hits == [[*pair, False, False] for pair in same]
