"""The model is the same everywhere, its sizes are checked, and tensor ranks have what their specs say."""

import pytest
import torch

from examples.reference_engine.collectives import Alone
from examples.reference_engine.config import VARIANTS, ReferenceConfig
from examples.reference_engine.dense import DenseModel
from examples.reference_engine.model import ReferenceModel
from examples.reference_engine.weights import Placement, embedding_weights, layer_weights, tensor_share
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

CPU = torch.device("cpu")
FIGURES = [-0.1464413693252105, 0.6082638814289485, -0.034171919795071865, 0.15490469366302848]


def test_weights_are_the_same_on_every_machine() -> None:
    """These figures were printed once: they hold on any CPU and with any later torch."""
    weights = layer_weights(ReferenceConfig(seed=5), 2, CPU)
    embed = embedding_weights(ReferenceConfig(seed=5), CPU)["embed"]
    assert [*weights["q"][0, :3].tolist(), embed[0, 0].item()] == FIGURES


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_of_tensor_ranks_make_up_the_whole(variant: str) -> None:
    config = ReferenceConfig(variant)
    whole = layer_weights(config, 0, CPU)
    halves = [tensor_share(whole, Placement(tp_rank, 2)) for tp_rank in range(2)]
    for name, weight in whole.items():
        first, second = (half[name] for half in halves)
        assert (
            torch.equal(first, weight)
            or torch.equal(torch.cat([first, second], 0), weight)
            or torch.equal(torch.cat([first, second], 1), weight)
        )


def test_specs_of_each_kind() -> None:
    def specs(variant: str) -> list[object]:
        return list(
            ReferenceConfig(variant, num_layers=2 if variant in {"mla", "mamba"} else 3).kv_cache_specs(2).values()
        )

    full = FullAttentionSpec(4, 1, 8, "float64")
    window, chunks = (
        SlidingWindowSpec(4, 1, 8, "float64", sliding_window=10),
        ChunkedLocalAttentionSpec(4, 1, 8, "float64", attention_chunk_size=12),
    )
    assert specs("full") == [full] * 3
    assert specs("sliding") == [window, window, full]
    assert specs("chunked") == [chunks, chunks, full]
    assert specs("mla") == [MLAAttentionSpec(4, 1, 16, "float64")] * 2  # latent vectors are whole on every rank
    assert specs("mamba") == [
        MambaSpec(4, shapes=((8, 2), (8, 4)), dtypes=("float32", "float64"), mamba_type="mamba1"),
        full,
    ]
    assert list(ReferenceConfig("mamba", num_layers=2).kv_cache_specs()) == [
        "model.layers.0.mixer",
        "model.layers.1.self_attn",
    ]


def test_stages_have_consecutive_layers() -> None:
    stages = [list(Placement.of_rank(rank, 2, 3).layers(7)) for rank in range(6)]
    assert stages == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5, 6], [4, 5, 6]]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"variant": "linear"}, "variant"),
        ({"num_layers": 0}, "num_layers"),
        ({"head_size": 7}, "head_size"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim"),
        ({"num_heads": 3}, "num_kv_heads"),
        ({"mamba_conv_kernel": 1}, "mamba_conv_kernel"),
        ({"dtype": "float1"}, "dtype"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ReferenceConfig(**options)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="tp_size: 4 ranks cannot divide num_kv_heads 2"):
        ReferenceConfig().kv_cache_specs(4)


def test_a_layout_without_keys_and_values_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"layer 'model\.layers\.0\.self_attn': 'mla' is not a layout"):
        ReferenceModel(ReferenceConfig(), CPU, Alone(), layout="mla")


@pytest.mark.parametrize("variant", VARIANTS)
def test_far_tokens_change_the_choice(variant: str) -> None:
    """A model whose choice hangs on the last few tokens alone would prove nothing about blocks."""
    dense = DenseModel(ReferenceConfig(variant), CPU)
    prompt = [(7 * i) % 128 for i in range(48)]
    other = [1, *prompt[1:]]
    differing = [a != b for a, b in zip(dense.greedy_tokens(prompt, 9), dense.greedy_tokens(other, 9), strict=True)]
    assert sum(differing) > len(differing) // 4


def test_one_rank_has_no_neighbours() -> None:
    with pytest.raises(RuntimeError, match="one stage"):
        Alone().send(torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="one stage"):
        Alone().recv((1, 2), torch.zeros(1))
