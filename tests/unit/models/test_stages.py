"""Pipeline stages: which layers each one holds."""

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.models.config import ModelOptions, derive_model, split_stages
from support.models import changed, derive
from support.paths import MODEL_CONFIGS


@pytest.mark.parametrize(
    ("name", "stages", "counts"),
    [
        ("llama-3.1-8b", 1, [32]),
        ("llama-3.1-8b", 4, [8, 8, 8, 8]),
        ("llama-3.1-8b", 3, [11, 11, 10]),
        ("llama-3.1-8b", 5, [6, 6, 7, 7, 6]),
        ("llama-3.1-8b", 32, [1] * 32),
        ("deepseek-v3", 2, [31, 30]),
        ("deepseek-v3", 4, [15, 15, 16, 15]),
        ("deepseek-v3.2", 4, [30, 30, 32, 30]),
    ],
)
def test_remaining_layers_go_to_the_stages_before_the_last(name: str, stages: int, counts: list[int]) -> None:
    assert [len(stage) for stage in split_stages(derive(name), stages)] == counts


@pytest.mark.parametrize("name", sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_stages_hold_all_layers_once_and_in_order(name: str, stages: int) -> None:
    model = derive(name)
    held = [item for stage in split_stages(model, stages) for item in stage.items()]
    assert held == list(model.layers)


def test_layers_without_a_cache_count_for_the_split() -> None:
    first, second = split_stages(derive("nemotron-h-8b"), 2)
    assert list(first)[-1] == "model.layers.24.mixer"
    assert next(iter(second)) == "model.layers.26.mixer"
    assert (len(first), len(second)) == (14, 14)


def test_states_without_attention_keep_the_numbers_of_their_layers() -> None:
    config = changed("nemotron-h-8b", hybrid_override_pattern="M-M-", num_hidden_layers=4)
    model = derive_model(config, ModelOptions())
    assert model.layer_indices == (0, 2)
    assert [list(stage) for stage in split_stages(model, 2)] == [["model.layers.0.mixer"], ["model.layers.2.mixer"]]


@pytest.mark.parametrize("stages", [-1, 0, 33])
def test_a_stage_without_layers_is_refused(stages: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        split_stages(derive("llama-3.1-8b"), stages)
    assert caught.value.field == "pipeline_parallel_size"
