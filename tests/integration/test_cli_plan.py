"""`kvpool plan` with the configs of public models: a plan, or one clear error message."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.command import Done, kvpool
from support.paths import MODEL_CONFIGS
from support.plans import read_recorded


def run(*arguments: object) -> Done:
    return kvpool("plan", *arguments, COLUMNS="160")


def plan(config: str, *arguments: object) -> dict[str, Any]:
    return plan_of(MODEL_CONFIGS / f"{config}.json", *arguments)


def plan_of(config: Path, *arguments: object) -> dict[str, Any]:
    done = run(config, *arguments, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_model_of_full_attention() -> None:
    answer = plan("llama-3.1-8b", "--memory", "20GiB", "--max-model-len", 8192)
    assert (answer["num_blocks"], answer["num_tokens"], answer["max_concurrency"]) == (10240, 163_840, 20.0)
    assert answer["max_requests"] == 10239
    assert (answer["layers_by_kind"], answer["kv_bytes_per_token"]) == ({"FullAttentionSpec": 32}, 131_072)
    (rank,) = answer["ranks"]
    first = {"size_bytes": 671_088_640, "shared_by": ["model.layers.0.self_attn.attn"], "offsets_bytes": []}
    assert rank["tensors"][0] == first
    assert (len(rank["tensors"]), rank["used_bytes"]) == (32, 20 * 2**30)
    assert answer["warnings"] == []


def test_engines_that_share_the_cache_each_need_memory_for_themselves() -> None:
    engines = ("--memory", "80GiB", "--max-model-len", 8192, "--engines", 3, "--engine-memory", "20GiB")
    answer = plan("llama-3.1-8b", *engines)
    assert answer == plan("llama-3.1-8b", "--memory", "20GiB", "--max-model-len", 8192) | {"engines": 3}
    shown = run(MODEL_CONFIGS / "llama-3.1-8b.json", *engines).stdout
    assert re.search(rf"\.\.\. of each engine, if all have as many +│ +{answer['max_concurrency'] / 3:.2f} ", shown)


def test_host_memory_for_evicted_blocks_is_planned_if_it_is_given() -> None:
    arguments = ("--memory", "20GiB", "--max-model-len", 8192, "--tp", 2)
    answer = plan("llama-3.1-8b", *arguments, "--host-memory", "64GiB")
    host = {"num_host_blocks": 65_536, "num_host_tokens": 65_536 * 16}
    assert answer == plan("llama-3.1-8b", *arguments) | host
    shown = run(MODEL_CONFIGS / "llama-3.1-8b.json", *arguments, "--host-memory", "64GiB").stdout
    assert re.search(r"blocks in host memory +│ +65,536, 1,048,576 tokens ", shown)


@pytest.mark.parametrize(
    ("config", "options", "figure", "value"),
    [
        ("llama-3.1-8b", ("--kv-dtype", "turboquant_k8v4"), "kv_bytes_per_token", 4 * 4096 + 28 * 1568),
        ("llama-3.1-8b", ("--block-size", "32"), "blocks_per_request", 131_072 // 32),
        ("gemma-3-27b-it", ("--no-hybrid",), "blocks_per_request", 131_072 // 16),
        ("qwen3-next-80b-a3b", ("--mamba-caching", "--mamba-cache-mode", "all"), "blocks_per_request", 497),
        ("qwen3-next-80b-a3b", ("--mamba-caching", "--mamba-cache-mode", "align"), "blocks_per_request", 488),
    ],
)
def test_an_option_changes_the_plan(config: str, options: tuple[str, ...], figure: str, value: int) -> None:
    assert plan(config, "--memory", "80GiB", *options)[figure] == value


def test_a_backend_chooses_the_size_of_blocks() -> None:
    memory = ("--memory", "80GiB", "--max-model-len", 8192)
    for backend, size in {"FLASHMLA": 64, "CUTLASS_MLA": 128, "TRITON_MLA": 16}.items():
        (group,) = plan("deepseek-v3", *memory, "--backend", backend)["groups"]
        assert group["block_span_tokens"] == size
    (group,) = plan("deepseek-v3", *memory, "--backend", "FLASHMLA", "--block-size", 256)["groups"]
    assert group["block_span_tokens"] == 256


def test_a_mixed_model_on_four_ranks_of_different_memory() -> None:
    memory = [part for size in ("20GiB", "20GiB", "18GiB", "19.5GiB") for part in ("--memory", size)]
    answer = plan("gemma-3-27b-it", "--tp", 2, "--pp", 2, *memory, "--max-model-len", "131072")
    assert [len(group["layer_names"]) for group in answer["groups"]] == [9, 9, 9, 9, 8, 8, 10]
    assert [group["blocks_per_request"] for group in answer["groups"]] == [193] * 6 + [8192]
    assert {rank["num_blocks"] for rank in answer["ranks"]} == {answer["num_blocks"]}
    assert [(rank["pipeline_stage"], rank["tensor_rank"]) for rank in answer["ranks"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(rank["used_bytes"] <= rank["available_bytes"] for rank in answer["ranks"])
    assert max(rank["used_bytes"] for rank in answer["ranks"]) > 0.999 * 18 * 2**30
    assert 0 < answer["padding_fraction"] < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.json"], "Missing option '--memory'."),
        (["--memory", "1GiB"], "give CONFIG.json, or --layers FILE"),
        (
            [MODEL_CONFIGS / "llama-3.1-8b.json", "--memory", "8GiB", "--host-memory", "-1GiB"],
            "--host-memory: must not be negative",
        ),
        (
            [MODEL_CONFIGS / "llama-3.1-8b.json", "--memory", "8GiB", "--engines", "2", "--engine-memory", "4GiB"],
            "--engine-memory: 2 x 4.0 GiB leave nothing of 8.0 GiB",
        ),
        (["--memory", "1GiB", "--tp", "3", "--dcp", "2"], "--dcp 2 does not divide --tp 3"),
    ],
)
def test_wrong_usage_is_json_if_json_is_wanted(arguments: list[object], message: str) -> None:
    done = run(*arguments, "--json")
    assert (done.returncode, done.stderr) == (2, "")
    assert json.loads(done.stdout) == {"error": {"reason": "USAGE", "field": "", "message": message}}
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_the_name_of_a_model_is_explained() -> None:
    done = run("Qwen/Qwen3-0.6B", "--memory", "1GiB")
    assert done.returncode == 2
    assert "kvpool downloads no models: run `hf download Qwen/Qwen3-0.6B config.json`" in done.stderr
    assert "hf download" not in run("Qwen/config.json", "--memory", "1GiB").stderr


def test_the_folder_of_a_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((MODEL_CONFIGS / "llama-3.1-8b.json").read_bytes())
    assert run(tmp_path, "--memory", "20GiB").returncode == 0


def test_tokens_are_those_of_requests_of_maximum_length() -> None:
    """As vLLM counts them: windows and states take little of a long request."""
    answer = plan("gemma-3-27b-it", "--memory", "40GiB", "--max-model-len", 131_072)
    figures = ("kv_bytes_per_token", "windowed_kv_bytes_per_token", "state_bytes_per_request")
    assert [answer[name] for name in figures] == [81_920, 425_984, 0]
    blocks = sum(group["blocks_per_request"] for group in answer["groups"])
    assert answer["max_concurrency"] == answer["num_blocks"] / blocks
    assert answer["num_tokens"] == answer["tokens_at_max_model_len"] == int(answer["max_concurrency"] * 131_072)
    shown = run(MODEL_CONFIGS / "gemma-3-27b-it.json", "--memory", "40GiB", "--max-model-len", 131_072).stdout
    assert re.search(rf"maximum concurrency of such requests +│ +{answer['max_concurrency']:.2f} ", shown)
    assert re.search(rf"tokens of these requests together +│ +{answer['num_tokens']:,} ", shown)


def test_tables_and_json_agree() -> None:
    done = run(MODEL_CONFIGS / "jamba-v0.1.json", "--memory", "40GB")
    assert done.returncode == 0
    answer = plan("jamba-v0.1", "--memory", "40GB")
    shown = [f"{answer['num_blocks']:,}", f"{answer['max_concurrency']:.2f}", f"{answer['padding_fraction']:.2%}"]
    assert all(figure in done.stdout for figure in shown)
    assert re.search(rf"most requests at once, however short +│ +{answer['max_requests']:,} ", done.stdout)
    assert "28 Mamba" in done.stdout
    assert "note: attention block size" in done.stdout


def test_vectors_of_many_tokens_count_in_bytes_per_token(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(read_recorded()["DeepseekV4ForCausalLM of Flash"]["config"]))
    answer = plan_of(config, "--memory", "80GiB")
    assert answer["kv_bytes_per_token"] == 21 * (584 + 132) // 4 + 20 * 584 // 128


def test_blocks_are_outermost_in_one_buffer() -> None:
    plain = plan("llama-3.1-8b", "--memory", "20GiB", "--max-model-len", 8192)
    answer = plan("llama-3.1-8b", "--memory", "20GiB", "--max-model-len", 8192, "--block-outermost")
    assert answer["num_blocks"] == plain["num_blocks"]
    (tensor,) = answer["ranks"][0]["tensors"]
    assert tensor["size_bytes"] == 20 * 2**30
    assert tensor["offsets_bytes"] == [65_536 * i for i in range(32)]


def test_a_model_that_does_not_fit_is_refused_with_all_figures() -> None:
    done = run(MODEL_CONFIGS / "llama-3.1-8b.json", "--memory", "1GiB")
    assert done.returncode == 1
    assert "131072 tokens takes 16.00 GiB (8193 blocks), there are 1.00 GiB (512 blocks)" in done.stderr
    done = run(MODEL_CONFIGS / "llama-3.1-8b.json", "--memory", "1GiB", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["reason"]) == (1, "ONE_REQUEST_DOES_NOT_FIT")
    assert (error["needed_bytes"], error["available_bytes"]) == (8193 * 2**21, 2**30)
    assert (error["max_model_len"], error["estimated_max_model_len"]) == (131_072, 511 * 16)
    assert "the longest that fits has 8176 tokens" in error["message"]


def test_auto_finds_the_longest_length_that_fits() -> None:
    answer = plan("llama-3.1-8b", "--memory", "2GiB", "--max-model-len", "auto")
    assert answer["max_model_len"] == answer["longest_request_tokens"] == 1023 * 16
    assert answer["warnings"] == []


def test_more_blocks_than_fit_are_planned_with_a_warning() -> None:
    answer = plan("llama-3.1-8b", "--memory", "40GiB", "--num-blocks", 100_000)
    assert answer["num_blocks"] == 100_000
    assert answer["warnings"] == ["rank 0 has 40.0 GiB, and 100,000 blocks need 195.3 GiB"]
    answer = plan("llama-3.1-8b", "--memory", "40GiB", "--num-blocks", 101, "--max-model-len", "auto")
    assert answer["max_model_len"] == 1600


def test_figures_of_a_rank_are_its_own() -> None:
    answer = plan("llama-3.1-8b", "--memory", "40GiB", "--pp", 2)
    assert answer["kv_bytes_per_token"] == 131_072
    assert [rank["kv_bytes_per_token"] for rank in answer["ranks"]] == [65_536] * 2
    assert [rank["request_bytes"] for rank in answer["ranks"]] == [65_536 * 131_072] * 2
    plain = plan("nemotron-h-8b", "--memory", "40GiB")["state_bytes_per_request"]
    assert (
        plan("nemotron-h-8b", "--memory", "40GiB", "--num-speculative-tokens", 3)["state_bytes_per_request"] > 4 * plain
    )


def test_tokens_are_spread_only_over_ranks_with_the_same_heads() -> None:
    done = run(MODEL_CONFIGS / "llama-3.1-8b.json", "--memory", "40GiB", "--tp", 8, "--dcp", 2)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--dcp: 2 ranks (--dcp) cannot spread the tokens of a head" in done.stderr
    alone = plan("llama-3.1-8b", "--memory", "40GiB", "--tp", 16)
    spread = plan("llama-3.1-8b", "--memory", "40GiB", "--tp", 16, "--dcp", 2)
    assert spread["max_concurrency"] == 2 * alone["max_concurrency"]
    assert spread["groups"][0]["block_span_tokens"] == 32
    assert plan("deepseek-v3", "--memory", "40GiB", "--tp", 8, "--dcp", 8)["num_blocks"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "much"], "is not a size such as 80GiB"),
        (["--memory", "0"], "no memory is left"),
        (["--memory", "40"], "'40' has no unit; give one, such as 40GiB or 40GB (40B for bytes)"),
        (["--memory", "1GiB", "--memory", "2GiB"], "give it once, or once per rank"),
        (["--memory", "80GiB", "--kv-dtype", "int3"], "--kv-dtype: 'int3' is not known; known: auto, fp8"),
        (["--memory", "80GiB", "--max-model-len", "1" * 5000], "neither a number of tokens"),
        (["--memory", "80GiB", "--tp", "3"], "3 ranks (--tp) cannot divide"),
        (["--memory", "80GiB", "--pp", "33"], "number of decoder layers"),
        (["--memory", "80GiB", "--block-size", "0"], "--block-size"),
        (["--memory", "80GiB", "--layers", "x.json"], "--layers cannot be combined"),
        (
            ["--memory", "80GiB", "--like", "Llama"],
            "--like: 'Llama' is not known. 146 architectures are known, such as LlamaForCausalLM",
        ),
    ],
)
def test_bad_arguments_are_refused_on_one_line(arguments: list[str], words: str) -> None:
    done = run(MODEL_CONFIGS / "llama-3.1-8b.json", *arguments)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_architecture_may_be_likened_to_a_known_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = json.loads((MODEL_CONFIGS / "llama-3.1-8b.json").read_text())
    path.write_text(json.dumps(config | {"architectures": ["NobodyForCausalLM"]}))
    done = run(path, "--memory", "80GiB", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["field"]) == (1, "architectures")
    assert "architectures are known, such as" in error["message"]
    assert "--layers FILE" in error["message"]
    likened = run(path, "--memory", "80GiB", "--like", "LlamaForCausalLM")
    assert likened.returncode == 0
    assert "read as that of LlamaForCausalLM" in likened.stdout


def test_odd_names_are_shown_unchanged(tmp_path: Path) -> None:
    config = json.loads((MODEL_CONFIGS / "gemma-3-27b-it.json").read_text()) | {"architectures": ["[/red]x\ud800"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8-sig")
    done = run(path, "--memory", "80GiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[/red]x\\ud800" in done.stdout


def test_a_layer_number_out_of_range_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    for number in ("99999999999", "9" * 5000):
        spec = {"type": "FullAttentionSpec", "block_size": 16}
        path.write_text(json.dumps({"layers": {f"model.layers.{number}.a": spec}}))
        done = run("--layers", path, "--memory", "1GiB", "--max-model-len", 100)
        assert (done.returncode, "[0, 10000)" in done.stderr or "[0, 9999]" in done.stderr) == (1, True)


def test_layers_of_a_file_are_planned_over_stages(tmp_path: Path) -> None:
    full = {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    window = full | {"type": "SlidingWindowSpec", "sliding_window": 1024}
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"layers": {f"l.{i}.attn": full if i >= 4 else window for i in range(8)}}))
    done = run("--layers", path, "--memory", "20GiB", "--pp", 2, "--max-model-len", 8192, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [rank["groups"] for rank in answer["ranks"]] == [
        [[f"l.{i}.attn" for i in range(4)], []],
        [[], [f"l.{i}.attn" for i in range(4, 8)]],
    ]
    assert {rank["num_blocks"] for rank in answer["ranks"]} == {81_920}
    done = run("--layers", path, "--memory", "20GiB")
    assert (done.returncode, "--max-model-len" in done.stderr) == (2, True)
