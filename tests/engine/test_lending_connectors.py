"""Engines on one lent memory with a KV connector that fails to load some blocks."""

import random
from pathlib import Path

import pytest

from engine.models import VOCABULARY
from engine.serving import Answer, ServedEngine, site
from kvpool.client import connect

NUM_BLOCKS = 120
Prompts = list[list[int]]


def drawn(draw: random.Random, count: int) -> Prompts:
    return [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(100, 250))] for _ in range(count)]


def ask(engine: ServedEngine, name: str, prompts: Prompts) -> list[Answer]:
    return [engine.ask(f"{name}-{i}", prompt, 20) for i, prompt in enumerate(prompts)]


@pytest.mark.complete  # three engines
def test_what_an_engine_fails_to_load_is_not_hit_by_the_other(address: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    prompts = drawn(draw, 24)
    with site(address, NUM_BLOCKS, f"connectors-{tmp_path.name}") as place:
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        engines = [
            place.engine(
                options={
                    "max_num_batched_tokens": 16384,  # vLLM's connector stores what the first step of a prompt computes
                    "kv_transfer_config": {
                        "kv_connector": "FailingConnector",
                        "kv_connector_module_path": "engine.failing_connector",
                        "kv_role": "kv_both",
                        "kv_load_failure_policy": "recompute",
                        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
                    },
                }
            )
            for folder in folders
        ]
        expected = place.of_vllm_alone(prompts, 20)
        for engine in engines:
            engine.wait_ready()
        for turn in range(3):
            answers = [ask(engine, f"{turn}", draw.sample(prompts, len(prompts))) for engine in engines]
            others = [ask(engine, f"{turn}-others", drawn(draw, 30)) for engine in engines]  # evict them
            for engine, asked, other in zip(engines, answers, others, strict=True):
                engine.wait(*asked, *other)
                known = {tuple(answer.prompt): answer.tokens for answer in asked}
                assert [known[tuple(answer.prompt)] for answer in expected] == [answer.tokens for answer in expected]
        with connect(address) as client:
            assert client.get_pool(place.pool).prefix_cache.shared_hits_tokens
    for folder in folders:
        assert (folder / "failed").stat().st_size > 5
        assert (folder / "loaded").stat().st_size > 5
