"""Whole vLLM engines on a GPU: alone, on kvpool, and on lent memory. Prints one JSON object.

Each answers the same requests, and every token must be equal: in float32, so that attention, norms and sampling are
Triton's and torch's.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.update(
    TRITON_F32_DEFAULT="ieee",  # a warm engine computes in other batches: with less precision tokens would differ
    VLLM_USE_FLASHINFER_SAMPLER="0",
)

from engine.lending import attached_to
from engine.models import LLAMA
from engine.pairs import SCHEDULER, Engine, run_engine, run_pair
from engine.results import Results
from engine.service import service
from support.lending import LenderProcess

WORKLOADS = ("shared prefixes", "conversations")
MEMORY_BYTES = 256 * 2**20
ENGINE = Engine(
    LLAMA,
    256,
    WORKLOADS,
    {
        "attention_backend": "TRITON_ATTN",
        "compilation_config": {"custom_ops": ["none"]},
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
        "async_scheduling": False,
        "max_num_seqs": 64,
    },
)
"""An engine with vLLM's share of the device, which measures its memory."""


def on_its_own_memory(server: str, folder: Path) -> Results:
    """An engine on kvpool answers as vLLM alone, step by step. Both run at once, each on its share of the device."""
    attached = {"scheduler_cls": SCHEDULER, "additional_config": {"kvpool": {"address": server, "pool": "own"}}}
    small = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": MEMORY_BYTES}
    pair = run_pair(replace(ENGINE, options={**ENGINE.options, **small}), attached, folder / "own")
    for workload in WORKLOADS:
        plain, pooled = pair.outcomes(workload)
        assert pooled["requests"] == plain["requests"], "tokens and logprobs"
        assert pooled["tables"] == plain["tables"], "block tables"
        assert pooled["counters"] == plain["counters"], "counters"
    return pair.plain


def on_lent_memory(server: str, folder: Path, device: str, plain: Results) -> list[Results]:
    """Engines on the memory of a worker, with vLLM's share of the device: one, two beside each other, and a restart.

    The later ones find what the first has computed. The last one sleeps before each workload.
    """
    flags = "--device", device, "--memory", f"{MEMORY_BYTES}B"
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        lender = LenderProcess(server, folder, 0, 1, *flags, pool="lent")
        stack.callback(lender.stop)  # after a kill its holder would keep the memory of the device for 10 minutes
        attached = attached_to(server, "lent", lender.address)
        run = partial(run_engine, ENGINE, attached)
        engines = [run(folder / "first"), *threads.map(run, [folder / "second", folder / "beside"])]
        engines.append(run_engine(ENGINE, {**attached, "enable_sleep_mode": True}, folder / "restarted"))
    for results in engines:
        assert _all_tokens(results) == _all_tokens(plain), "tokens on lent memory"
    return engines


def _all_tokens(results: Results) -> list[list[int]]:
    outcomes = (results["outcomes"][workload] for workload in WORKLOADS)
    return [answer["token_ids"] for outcome in outcomes for answers in outcome["requests"] for answer in answers]


def _hits(results: Results) -> int:
    return int(results["outcomes"][WORKLOADS[0]]["counters"]["prefix_cache_hits"])


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        with service(folder) as server:
            plain = on_its_own_memory(server.address, folder)
            sys.stderr.write(f"own memory: passed after {time.monotonic() - begun:.1f} s\n")
            first, *later = on_lent_memory(server.address, folder, device, plain)
            sys.stderr.write(f"lent memory: passed after {time.monotonic() - begun:.1f} s\n")
    restarted = later[-1]  # the other two share the blocks, and may evict each other's prefixes
    assert _hits(restarted) > _hits(first) == _hits(plain), "a restarted engine finds what the others have computed"
    tokens = _all_tokens(plain)
    figures = {
        "requests": len(tokens),
        "tokens_equal_in_six_engines": sum(map(len, tokens)),
        "hit_tokens_of_vllm_alone_and_on_kvpool": _hits(plain),
        "hit_tokens_of_a_restarted_engine_on_lent_memory": _hits(restarted),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
