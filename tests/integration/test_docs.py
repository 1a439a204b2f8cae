"""The Python examples of the documentation run as shown, with the names that they leave to the reader defined here."""

import json
import re
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.client import connect
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.planning.plan import PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.gpu_worker import layouts
from kvpool.gpu_worker.attention_backends import PagedAttentionBackend
from kvpool.gpu_worker.rank_pool import RankPool
from support import processes
from support.paths import DOCS, MODEL_CONFIGS
from support.server import running_server
from support.waiting import DEADLINE_SECONDS

MODEL = MODEL_CONFIGS / "llama-3.1-8b.json"


def examples(name: str) -> list[str]:
    """The Python examples of a page that are marked as tested here."""
    mark = f"<!-- tested: tests/integration/{Path(__file__).name} -->\n"
    return re.findall(mark + r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "docs", "exec"), names)  # noqa: S102 - our own pages


def test_examples_of_the_tensors_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_LAYOUTS", dict(layouts._LAYOUTS))
    layouts._LAYOUTS.pop("tokens_last", None)
    own_layout, once, each_step = examples("reference/tensors.md")
    run(own_layout, {})
    full = FullAttentionSpec(16, 2, 16, "float32")
    specs = {"l.0": full, "l.1": SlidingWindowSpec(16, 2, 16, "float32", sliding_window=64)}
    names: dict[str, Any] = {
        "config": get_kv_cache_configs([RankMemory(specs, 2**20)], PlanOptions(256)).configs[0],
        "device": torch.device("cpu"),
        "layers": {name: SimpleNamespace(kv_cache=None) for name in specs},
        "backends": {"l.0": PagedAttentionBackend("mine", "tokens_last"), "l.1": PagedAttentionBackend()},
        "max_num_reqs": 4,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
    }
    run(once, names)
    blocks = names["num_blocks"]
    assert names["layers"]["l.0"].kv_cache.shape == (blocks, 2, 2, 16, 16)
    assert names["layers"]["l.1"].kv_cache.shape == (2, blocks, 16, 2, 16)
    names["tables"].add_row(1, [[7, 8], [9, 10]])
    names |= {"row": 0, "last": 1, "block_ids": [[1], [2]], "new_block_ids": [[3], [4]]}
    names |= {"num_computed_tokens": np.array([15]), "num_scheduled_tokens": np.array([2])}
    run(each_step, names)
    slots = {name: metadata.slot_mapping.tolist() for name, metadata in names["metadata"].items()}
    assert slots == {"l.0": [7 * 16 + 15, 8 * 16], "l.1": [9 * 16 + 15, 10 * 16]}


def test_examples_of_the_ranks_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(json.loads(MODEL.read_text()) | {"num_hidden_layers": 2}))
    embedding, watching = examples("explanation/ranks.md")
    bound: list[RankPool] = []
    unbound: list[None] = []
    all_are_through = threading.Barrier(2)  # a rank that leaves ends the epoch of the other
    names = {
        "bind": bound.append,
        "unbind": lambda: unbound.append(None),
        "lease": TableLease(1, SessionNumber(1)),
        "run": lambda _: None,
        "step": None,
        "stay": lambda: all_are_through.wait(DEADLINE_SECONDS),
    }
    with running_server() as address, ThreadPoolExecutor(2) as threads:
        here = embedding.replace("host:50051", address).replace('"cuda:0"', '"cpu", memory_bytes=2**26')
        here = here.replace("timeout_seconds=300", f"timeout_seconds={DEADLINE_SECONDS}")
        here += textwrap.indent(watching, "    ") + "    stay()\n"
        seen: list[dict[str, Any]] = [dict(names) for _ in range(2)]
        ranks = [threads.submit(run, here.replace("rank=0", f"rank={rank}"), seen[rank]) for rank in range(2)]
        for rank in ranks:
            rank.result(DEADLINE_SECONDS)
    for number, left in enumerate(seen):
        labels = {"pool": "llama", "rank": str(number)}
        assert left["registry"].get_sample_value("kvpool_worker_joins_total", labels) == 1
        assert left["registry"].get_sample_value("kvpool_worker_state", {**labels, "state": "left"}) == 1
    assert [(pool.epoch, pool.num_blocks, len(pool.kv_caches)) for pool in bound] == [(1, 1024, 2)] * 2
    assert len(unbound) == 2


FOLLOWER = """
import os, sys, threading, time

names = {}
threading.Thread(target=exec, args=(sys.argv[1], names), daemon=True).start()
while not ("index" in names and names["index"].is_whole and len(names["index"]) == int(sys.argv[2])):
    time.sleep(0.01)
print(len(names["index"]), flush=True)
os._exit(0)  # the watch is endless
"""


def test_examples_of_the_block_events_page() -> None:
    declaration, router = examples("how-to/block-events.md")
    with running_server() as address, connect(address) as client:
        run(declaration.replace("localhost:50051", address), {})
        with client.open_session("llama") as session:
            assert session.admit(session.request("r", list(range(10 * 16 + 1))))
            code = router.replace("localhost:50051", address)
            done = processes.run(
                [sys.executable, "-c", FOLLOWER, code, "10"],
                capture_output=True,
                text=True,
                timeout=DEADLINE_SECONDS,
                check=False,
            )
    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr
