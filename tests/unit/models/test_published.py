"""Figures that papers and model cards state (docs/reference/models.md names them), and those of all configs."""

import pytest

from kvpool.core.specs.base import AttentionSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from kvpool.models.config import ModelOptions, derive_model
from support.models import EXPECTED_FIGURES, changed, derive, figures, full_bytes_per_token, kinds, specs_of
from support.paths import MODEL_CONFIGS

GIB = 2**30
CONTEXT_256K = 262_144


@pytest.mark.parametrize("name", EXPECTED_FIGURES)
def test_figures_of_a_config_are_those_expected(name: str) -> None:
    assert figures(derive(name)) == EXPECTED_FIGURES[name]


def test_every_config_has_expected_figures() -> None:
    assert sorted(EXPECTED_FIGURES) == sorted(path.stem for path in MODEL_CONFIGS.glob("*.json"))


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [("deepseek-v3", "70.272"), ("qwen2.5-72b", "327.680"), ("llama-3.1-405b", "516.096")],
)
def test_insights_into_deepseek_v3_table_1(name: str, kilobytes: str) -> None:
    assert f"{full_bytes_per_token(derive(name)) / 1000:.3f}" == kilobytes


@pytest.mark.parametrize(("name", "gigabytes"), [("llama-3.1-8b", 15.62), ("llama-3.1-70b", 39.06)])
def test_hugging_face_blog_on_llama_3_1(name: str, gigabytes: float) -> None:
    assert full_bytes_per_token(derive(name)) * 128_000 / GIB == pytest.approx(gigabytes, abs=0.006)


@pytest.mark.parametrize(("name", "gigabytes"), [("jamba-v0.1", 4), ("mixtral-8x7b-v0.1", 32), ("llama-2-7b", 128)])
def test_jamba_table_1(name: str, gigabytes: int) -> None:
    assert full_bytes_per_token(derive(name)) * CONTEXT_256K == gigabytes * GIB


def test_jamba_table_1_counts_mistral_without_its_window() -> None:
    model = derive_model(changed("mistral-7b-v0.1", sliding_window=None), ModelOptions())
    assert full_bytes_per_token(model) * CONTEXT_256K == 32 * GIB


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_deepseek_papers_keep_a_latent_and_a_rotary_key(name: str) -> None:
    for spec in specs_of(derive(name), MLAAttentionSpec):
        assert isinstance(spec, MLAAttentionSpec)
        assert (spec.num_kv_heads, spec.head_size) == (1, 512 + 64)


def test_mistral_7b_table_1() -> None:
    specs = specs_of(derive("mistral-7b-v0.1"), SlidingWindowSpec)
    assert specs == [SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=4096)] * 32


def test_gemma_2_report_alternates_local_and_global_layers() -> None:
    local = SlidingWindowSpec(16, 8, 256, "bfloat16", sliding_window=4096)
    full = FullAttentionSpec(16, 8, 256, "bfloat16")
    assert [spec for _, spec in derive("gemma-2-9b").layers] == [local, full] * 21


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "gemma-3-27b-it"])
def test_gemma_3_report_has_five_local_layers_to_a_global_one(name: str) -> None:
    specs = [spec for _, spec in derive(name).layers]
    for i, spec in enumerate(specs):
        assert isinstance(spec, FullAttentionSpec if i % 6 == 5 else SlidingWindowSpec)
        assert not isinstance(spec, SlidingWindowSpec) or spec.sliding_window == 1024


@pytest.mark.parametrize(("name", "count"), [("gpt-oss-20b", 24), ("gpt-oss-120b", 36)])
def test_gpt_oss_card_alternates_windows_of_128(name: str, count: int) -> None:
    windowed = SlidingWindowSpec(16, 8, 64, "bfloat16", sliding_window=128)
    full = FullAttentionSpec(16, 8, 64, "bfloat16")
    assert [spec for _, spec in derive(name).layers] == [windowed, full] * (count // 2)


def test_qwen3_next_card_repeats_three_delta_nets_and_one_attention() -> None:
    specs = [spec for _, spec in derive("qwen3-next-80b-a3b").layers]
    assert [type(spec) for spec in specs] == [MambaSpec, MambaSpec, MambaSpec, FullAttentionSpec] * 12
    state, attention = specs[0], specs[3]
    assert isinstance(state, MambaSpec)
    assert state.shapes[1] == (32, 128, 128)
    assert isinstance(attention, AttentionSpec)
    assert (attention.num_kv_heads, attention.head_size) == (2, 256)


def test_nemotron_h_paper_has_52_layers_of_which_4_attend() -> None:
    model = derive("nemotron-h-8b")
    assert model.num_hidden_layers == 52
    assert kinds(model) == {"MambaSpec": 24, "FullAttentionSpec": 4}
