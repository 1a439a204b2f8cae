"""The planner makes the plans of the reference, in every number and name, and refuses with the same facts."""

import gzip
import json
from typing import Any

import pytest

from conformance.conftest import golden_dir
from conformance.golden import Line, spec
from kvpool.server.core.plan import GIB, FitCheck, KVCacheConfig, Plan, PlanError, PlanOptions, RankMemory
from kvpool.server.core.planner import get_kv_cache_configs
from kvpool.server.core.specs import KVCacheSpec, UniformTypeKVCacheSpecs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        path = golden_dir(metafunc.config) / "plans.json.gz"
        cases = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else []
        metafunc.parametrize("case", [pytest.param(case, id=case["name"]) for case in cases])


def plan(case: Line, fit_check: FitCheck) -> Plan:
    ranks = [
        RankMemory({name: spec(value) for name, value in worker["specs"].items()}, worker["available_memory_bytes"])
        for worker in case["workers"]
    ]
    given = dict(case["options"])
    given["num_blocks_override"] = given.pop("num_gpu_blocks_override") or 0
    return get_kv_cache_configs(ranks, PlanOptions(**given, fit_check=fit_check))


def config_to_line(config: KVCacheConfig) -> Line:
    return {
        "num_blocks": config.num_blocks,
        "tensors": [{"size": tensor.size_bytes, "shared_by": list(tensor.shared_by)} for tensor in config.tensors],
        "groups": [
            {"layer_names": list(group.layer_names), "spec": spec_to_line(group.spec)} for group in config.groups
        ],
    }


def spec_to_line(value: KVCacheSpec) -> Line:
    """The numbers that a spec of the golden files can be made of, and its page."""
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
    if "needed_gib" in golden:
        facts |= {
            "needed_gib": round(error.needed_bytes / GIB, 2),
            "available_gib": round(error.available_bytes / GIB, 2),
            "max_model_len": error.max_model_len,
            "estimated_max_model_len": error.estimated_max_model_len,
        }
        assert f"{golden['needed_gib']:.2f} GiB" in error.message
        assert f"{golden['available_gib']:.2f} GiB" in error.message
        assert str(golden["estimated_max_model_len"]) in error.message
    assert facts == golden


def test_plan_as_the_reference(case: dict[str, Any]) -> None:
    if case.get("error", {}).get("reason") == "page_sizes_do_not_divide":  # where the reference gives up
        padded = plan(case, FitCheck.FIRST_GROUP).configs[0]
        assert padded.block_size_bytes == 8 * 49152
        assert padded.padding_bytes_per_block == (0, 8 * 16384, 8 * 16384)
    elif "error" in case:
        with pytest.raises(PlanError) as caught:
            plan(case, FitCheck.FIRST_GROUP)
        check_error(caught.value, case["error"])
    else:
        check_plan(plan(case, FitCheck.FIRST_GROUP), case["result"])


def test_counting_every_group_differs_only_where_the_reference_passes_what_cannot_run(case: dict[str, Any]) -> None:
    if case["name"] == "auto_fit_gemma":
        answer = plan(case, FitCheck.EVERY_GROUP)
        assert answer.max_model_len < case["result"]["max_model_len"]
        assert answer.max_concurrency >= 1 > case["result"]["max_concurrency"]
    elif case["name"] == "not_enough_memory_gemma":
        with pytest.raises(PlanError, match=r"takes 11\.41 GiB, there are 5\.00 GiB"):
            plan(case, FitCheck.EVERY_GROUP)
        assert case["result"]["max_concurrency"] < 1
    elif "result" in case:
        check_plan(plan(case, FitCheck.EVERY_GROUP), case["result"])
    elif case["error"]["reason"] != "page_sizes_do_not_divide":
        with pytest.raises(PlanError) as caught:
            plan(case, FitCheck.EVERY_GROUP)
        check_error(caught.value, case["error"])
