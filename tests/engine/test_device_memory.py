"""Engines on a GPU beside lent memory: vLLM's own check of free memory, with cards of 24, 80 and 141 GiB."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.utils import request_memory

from kvpool.client.vllm import Worker
from kvpool.v1.lending_pb2 import LendingOffer

GIB = 2**30
CARDS = {"24": (24, 6, 8), "80": (80, 16, 36), "141": (141, 30, 68)}
"""Total GiB, what an engine needs beside the lent memory, and the lent memory: two engines fit, and none besides."""
CONTEXT_GIB = 0.5
cards = pytest.mark.parametrize(("total", "engine", "lent"), CARDS.values(), ids=CARDS)


def snapshot(total: float, used: float) -> MemorySnapshot:
    """A card of which processes use a part, in GiB."""
    free = int((total - used - CONTEXT_GIB) * GIB)
    return MemorySnapshot(free_memory=free, total_memory=int(total * GIB), device="cuda:0", auto_measure=False)


def offered(lent: float, *, is_lent: bool = True, weights: float = 0.0) -> LendingOffer:
    """What the lender of a card says."""
    return LendingOffer(
        available_bytes=int(lent * GIB), is_lent=is_lent, device="cuda:0", weights_bytes=int(weights * GIB)
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Starts the device of a worker as vLLM's worker for GPUs does; returns its budget in GiB."""

    def start(offer: LendingOffer, taken: MemorySnapshot, share: float | None = None, external: int = 0) -> int:
        config = CacheConfig() if share is None else CacheConfig(gpu_memory_utilization=share)
        found: list[int] = []
        monkeypatch.setattr(
            Worker.__base__, "init_device", lambda _: found.append(gpu_worker.request_memory(taken, config, external))
        )
        worker: Any = object.__new__(Worker)
        worker._kvpool_lender = SimpleNamespace(offer=offer)
        try:
            worker.init_device()
        finally:
            assert gpu_worker.request_memory is request_memory, "other engines of the process have vLLM's check"
        return found[0] // GIB

    return start


def test_vllms_worker_makes_the_check_that_is_replaced() -> None:
    assert "request_memory" in inspect.unwrap(gpu_worker.Worker.init_device).__code__.co_names
    assert gpu_worker.request_memory is request_memory


@cards
def test_engines_start_beside_lent_memory_and_each_other(
    started: Callable[..., int], total: int, engine: int, lent: int
) -> None:
    assert started(offered(lent, is_lent=False), snapshot(total, 0)) == int(0.92 * total), "as vLLM alone"
    held = offered(lent, weights=engine * 0.8)
    for case, used in {"restart": lent, "second engine": lent + engine, "blue-green": lent + engine}.items():
        assert started(held, snapshot(total, used)) >= engine, case
        with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
            request_memory(snapshot(total, used), CacheConfig())


@cards
def test_engines_that_start_at_the_same_time_leave_each_other_room(
    started: Callable[..., int], total: int, engine: int, lent: int
) -> None:
    """The other has loaded its weights, and the memory is not allocated yet."""
    budget = started(offered(lent, is_lent=False), snapshot(total, engine))
    assert lent + engine <= budget <= 0.92 * total - engine


def test_a_share_that_is_free_is_that_of_one_engine(started: Callable[..., int]) -> None:
    """As in vLLM: two models on a card, with half of it each."""
    assert started(offered(80, is_lent=False), snapshot(80, 36), share=0.45) == 36
    assert started(offered(20), snapshot(80, 36), share=0.1) == 43, "no KV memory is taken from it"


@cards
def test_a_card_that_is_too_full_is_refused(started: Callable[..., int], total: int, engine: int, lent: int) -> None:
    weights, used = engine * 0.8, lent + 2 * engine
    message = (
        rf"does not fit on cuda:0\. It needs {weights:.1f} GiB for its weights alone; \d+\.\d GiB of {total}\.0 GiB"
    )
    with pytest.raises(ValueError, match=rf"{message} were free .* lender holds {lent}\.0 GiB\. Stop another engine"):
        started(offered(lent, weights=weights), snapshot(total, used))
    assert started(offered(lent, weights=weights), snapshot(total, used), external=int(weights * GIB)) >= 0
    with pytest.raises(ValueError, match=r"0\.92 of it that all may use .* the lender holds no KV memory yet"):
        started(offered(lent, is_lent=False), snapshot(total, 0.95 * total))


def test_an_engine_that_does_not_fit_after_all_is_told_what_the_lender_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    worker: Any = object.__new__(Worker)
    worker._kvpool_lender = SimpleNamespace(offer=offered(12))
    worker.init_snapshot = snapshot(24, 18)
    worker.use_v2_model_runner = False
    monkeypatch.setattr("kvpool.client.vllm.worker.current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(Worker.__base__, "compile_or_warm_up_model", fail)
    monkeypatch.setattr(Worker.__base__, "determine_available_memory", fail)
    message = r"more than it got: CUDA out of memory\. .*; 5\.5 GiB of 24\.0 GiB were free .* lender holds 12\.0 GiB"
    for method in (worker.determine_available_memory, worker.compile_or_warm_up_model):
        with pytest.raises(ValueError, match=message):
            method()


@pytest.mark.parametrize(
    ("first", "newest", "available"),
    [
        (offered(40, is_lent=False), offered(40, is_lent=False), 40),  # the lender plans less than is measured
        (offered(60, is_lent=False), offered(60, is_lent=False), 50),
        (offered(60, is_lent=False), offered(40), 40),  # another engine was faster
        (offered(40), offered(40), 40),
    ],
)
def test_an_engine_declares_what_is_lent_by_then_or_what_fits_both(
    monkeypatch: pytest.MonkeyPatch, first: LendingOffer, newest: LendingOffer, available: int
) -> None:
    worker: Any = object.__new__(Worker)
    worker._kvpool_lender = SimpleNamespace(offer=first)
    closed: list[bool] = []
    connection = SimpleNamespace(offer=newest, close=lambda: closed.append(True))
    worker._kvpool_connect = lambda *_: connection
    worker.vllm_config = worker.rank = None
    monkeypatch.setattr("kvpool.client.vllm.worker.current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(Worker.__base__, "determine_available_memory", lambda _: 50 * GIB)
    assert worker.determine_available_memory() == available * GIB
    assert closed
