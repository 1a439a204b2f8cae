"""The planner makes the plans of vLLM 0.32, with equal numbers and names, and refuses with the same facts."""

import gzip
import json
from typing import Any

import pytest

from conformance.conftest import golden_dir
from conformance.golden import Line, spec
from kvpool.core.planning.plan import GIB, KVCacheConfig, Plan, PlanError, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec, MambaCacheMode
from kvpool.core.specs.kinds import UniformTypeKVCacheSpecs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = golden_dir(metafunc.config) / "plans.json.gz"
    cases = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else []
    metafunc.parametrize("case", [pytest.param(case, id=case["name"]) for case in cases])


def plan(case: Line) -> Plan:
    ranks = [
        RankMemory({name: spec(value) for name, value in worker["specs"].items()}, worker["available_memory_bytes"])
        for worker in case["workers"]
    ]
    given = dict(case["options"])
    given["num_blocks_override"] = given.pop("num_gpu_blocks_override") or 0
    given["mamba_cache_mode"] = MambaCacheMode(given["mamba_cache_mode"])
    return get_kv_cache_configs(ranks, PlanOptions(**given))


def config_to_line(config: KVCacheConfig) -> Line:
    return {
        "num_blocks": config.num_blocks,
        "size_bytes": sum(tensor.size_bytes for tensor in config.tensors),
        "groups": [
            {"layer_names": list(group.layer_names), "spec": spec_to_line(group.spec)} for group in config.groups
        ],
    }


def spec_to_line(value: KVCacheSpec) -> Line:
    """The numbers of a spec that the golden files contain, and its page size."""
    line: Line = {"page_size_bytes": value.page_size_bytes, "spec": value}
    if isinstance(value, UniformTypeKVCacheSpecs):
        line["spec"] = {name: spec_to_line(layer) for name, layer in value.layers}
    return line


def expected_spec(golden: Line) -> Line:
    if golden["type"] == "UniformTypeKVCacheSpecs":
        layers = {name: expected_spec(layer) for name, layer in golden["layers"].items()}
        return {"page_size_bytes": golden["page_size_bytes"], "spec": layers}
    return {"page_size_bytes": golden["page_size_bytes"], "spec": spec(golden)}


def expected(worker: Line) -> Line:
    groups = [{**group, "spec": expected_spec(group["spec"])} for group in worker["groups"]]
    return {**worker, "groups": groups}


def check_plan(answer: Plan, result: Line) -> None:
    assert [config_to_line(config) for config in answer.configs] == [expected(worker) for worker in result["workers"]]
    assert answer.max_model_len == result["max_model_len"]
    if "max_concurrency" in result:
        assert answer.max_concurrency == pytest.approx(result["max_concurrency"], rel=1e-12)


def check_error(error: PlanError, golden: Line) -> None:
    facts: Line = {"reason": error.reason.lower()}
    if "needed_gib" in golden:  # two decimals, without the null block
        facts |= {
            "needed_gib": pytest.approx(error.needed_bytes / GIB, abs=0.01),
            "available_gib": pytest.approx(error.available_bytes / GIB, abs=0.01),
            "max_model_len": error.max_model_len,
            "estimated_max_model_len": error.estimated_max_model_len,
        }
    assert golden == facts


def test_plans_equal_those_of_vllm(case: dict[str, Any]) -> None:
    if "error" not in case:
        check_plan(plan(case), case["result"])
        return
    with pytest.raises(PlanError) as caught:
        plan(case)
    check_error(caught.value, case["error"])
