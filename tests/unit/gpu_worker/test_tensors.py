"""A rank's buffers: all or nothing, as many as fit, and the layers that see them."""

import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor
from kvpool.core.specs.kinds import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from kvpool.core.specs.pool_config import KVCacheGroup
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.tensors import (
    allocate_as_many,
    allocate_buffers,
    bind_kv_cache,
    empty_buffer,
    is_out_of_memory,
    reshape_kv_cache,
)
from support.processes import PIPE, environment
from support.torch import on_each_device
from support.waiting import DEADLINE_SECONDS

CPU = torch.device("cpu")
FULL = FullAttentionSpec(16, 2, 8, "float16")  # 1024 bytes a page
WINDOW = SlidingWindowSpec(16, 2, 8, "float16", sliding_window=20)
ENCODER = EncoderOnlyAttentionSpec(16, 2, 8, "float16")
PAGE = 1024
CONFIG = KVCacheConfig(
    10,
    (KVCacheTensor(10 * PAGE, ("full.0", "window.0")), KVCacheTensor(10 * PAGE, ("full.1",))),
    (KVCacheGroup(FULL, ("full.0", "full.1")), KVCacheGroup(WINDOW, ("window.0",))),
)


@dataclass
class Memory:
    """A device of limited memory: counts what is allocated, and what a caller has kept."""

    capacity_bytes: int
    error: Exception = field(default_factory=MemoryError)
    tries: list[int] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)

    def allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        self.held = [buffer for buffer in self.held if sys.getrefcount(buffer) > 3]  # list, loop variable, argument
        if sum(map(len, self.held)) + size_bytes > self.capacity_bytes:
            raise self.error
        self.tries.append(size_bytes)
        buffer = torch.full((size_bytes,), 7, dtype=torch.int8, device=device)
        self.held.append(buffer)
        return buffer


@on_each_device
def test_each_planned_tensor_gets_a_zeroed_buffer(device: torch.device) -> None:
    memory = Memory(20 * PAGE)
    buffers = allocate_buffers(CONFIG, device, memory.allocate)
    assert [(b.dtype, b.device, tuple(b.shape)) for b in buffers] == [(torch.int8, device, (10 * PAGE,))] * 2
    assert not any(buffer.any() for buffer in buffers)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_a_failure_frees_what_was_allocated(error: Exception) -> None:
    memory = Memory(20 * PAGE - 1, error)
    with pytest.raises(MemoryError, match=r"10 blocks of 2048 bytes \(20.0 KiB in 2 buffers\) do not fit cpu"):
        allocate_buffers(CONFIG, CPU, memory.allocate)
    assert memory.tries == [10 * PAGE]
    memory.capacity_bytes = 10 * PAGE
    memory.allocate(10 * PAGE, CPU)  # it fits again


def test_other_errors_are_not_taken_for_exhausted_memory() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not is_out_of_memory(error)
    memory = Memory(10 * PAGE, error)
    for allocate in (allocate_buffers, allocate_as_many):
        with pytest.raises(RuntimeError, match="illegal memory access") as caught:
            allocate(CONFIG, CPU, allocate=memory.allocate)
        assert caught.value is error
        memory.allocate(10 * PAGE, CPU)  # though the error is still at hand, and its traceback with it
        memory.held.clear()


@on_each_device
@pytest.mark.parametrize("free_blocks", range(2, 12))
def test_as_many_blocks_as_fit(device: torch.device, free_blocks: int) -> None:
    memory = Memory(free_blocks * 2 * PAGE + PAGE)
    buffers, num_blocks = allocate_as_many(CONFIG, device, allocate=memory.allocate)
    assert num_blocks == min(free_blocks, 10)
    assert [tuple(buffer.shape) for buffer in buffers] == [(num_blocks * PAGE,)] * 2
    assert not any(buffer.any() for buffer in buffers)


def test_a_reserve_is_left_free() -> None:
    memory = Memory(20 * PAGE)
    buffers, num_blocks = allocate_as_many(CONFIG, CPU, reserve_bytes=5 * PAGE, allocate=memory.allocate)
    assert (len(buffers), num_blocks) == (2, 7)
    memory.allocate(5 * PAGE, CPU)


def test_fewer_than_two_blocks_are_an_error() -> None:
    memory = Memory(4 * PAGE - 1)
    with pytest.raises(MemoryError, match="2 blocks of 2048 bytes"):
        allocate_as_many(CONFIG, CPU, allocate=memory.allocate)


def test_memory_that_shrinks_between_tries_is_an_error() -> None:
    memory = Memory(9 * 2 * PAGE)

    def shrinking(size_bytes: int, device: torch.device) -> torch.Tensor:
        if len(memory.tries) >= 6:
            memory.capacity_bytes = PAGE
        return memory.allocate(size_bytes, device)

    with pytest.raises(MemoryError):
        allocate_as_many(CONFIG, CPU, allocate=shrinking)


def test_tries_grow_as_the_logarithm_of_the_blocks() -> None:
    count = 0

    def allocate(size_bytes: int, device: torch.device) -> torch.Tensor:
        nonlocal count
        count += 1
        if size_bytes > 5 * PAGE:
            raise MemoryError
        return empty_buffer(size_bytes, device)

    million = KVCacheConfig(2**20, (KVCacheTensor(2**20 * PAGE, ("a",)),), (KVCacheGroup(FULL, ("a",)),))
    assert allocate_as_many(million, CPU, allocate=allocate)[1] == 5
    assert count <= 23


REAL_FAILURE = """
import resource
import torch
from kvpool.gpu_worker.tensors import allocate_as_many, allocate_buffers
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor

tensors = tuple(KVCacheTensor(256 * 2**20, (f"layer.{i}",)) for i in range(8))
config = KVCacheConfig(1024, tensors, ())
torch.zeros(1)
in_use_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + 2**29, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        allocate_buffers(config, torch.device("cpu"))
    except MemoryError as error:
        print(error)
buffers, num_blocks = allocate_as_many(config, torch.device("cpu"), reserve_bytes=2**26)
print(num_blocks, {len(buffer) for buffer in buffers}, len(buffers))
"""


@pytest.mark.slow
def test_a_process_with_a_memory_limit_gets_the_blocks_that_fit() -> None:
    """2 GiB are planned. The process may take 512 MiB more, 64 of them not for blocks: about 223 blocks of 2 MiB."""
    # One thread: each further one, up to one per core, takes a stack and a heap from the limit, at any time.
    run = [sys.executable, "-c", REAL_FAILURE]
    done = subprocess.run(run, env=environment(), stdout=PIPE, text=True, timeout=DEADLINE_SECONDS, check=True)
    first, second, got = done.stdout.splitlines()
    assert first == second == "1024 blocks of 2097152 bytes (2.0 GiB in 8 buffers) do not fit cpu"
    num_blocks = int(got.split()[0])
    assert 150 <= num_blocks <= 224
    assert got == f"{num_blocks} {{{num_blocks * 2**18}}} 8"


@on_each_device
def test_each_layer_sees_its_pages(device: torch.device) -> None:
    buffers = allocate_buffers(CONFIG, device)
    caches = reshape_kv_cache(CONFIG, 10, buffers, {"window.0": "flashinfer_hnd"}, [8, 0])
    assert [(name, tuple(view.shape)) for name, view in caches.items() if isinstance(view, torch.Tensor)] == [
        ("full.0", (2, 20, 8, 2, 8)),
        ("full.1", (2, 20, 8, 2, 8)),
        ("window.0", (10, 2, 16, 2, 8)),
    ]


def test_a_pool_may_have_fewer_blocks_than_a_rank_allocated() -> None:
    buffers = allocate_buffers(CONFIG, CPU)
    whole, part = (reshape_kv_cache(CONFIG, n, buffers)["full.1"] for n in (10, 4))
    assert isinstance(whole, torch.Tensor)
    assert isinstance(part, torch.Tensor)
    whole[:, :4] = torch.rand(2, 4, 16, 2, 8)
    assert torch.equal(whole[:, :4], part)


SIDE_BY_SIDE = replace(
    CONFIG, tensors=(KVCacheTensor(10 * 2 * PAGE, ("full.0", "full.1", "window.0"), (0, PAGE, PAGE)),)
)


@pytest.mark.parametrize(
    ("offsets_bytes", "why"),
    [
        ((0, PAGE), "2 offsets for 3 layers"),
        ((0, PAGE - 2, PAGE), "'full.1' overlaps with 'full.0' of the same group"),
        ((PAGE, 0, PAGE + 2), "'window.0' has bytes 1026 to 2050 of a block, and blocks have 2048"),
        ((0, PAGE, 1), "layer 'window.0': the buffer is not aligned"),
    ],
)
def test_layers_that_do_not_lie_side_by_side_are_refused(offsets_bytes: tuple[int, ...], why: str) -> None:
    tensor = replace(SIDE_BY_SIDE.tensors[0], offsets_bytes=offsets_bytes)
    with pytest.raises(InvalidArgumentError, match=why):
        reshape_kv_cache(replace(SIDE_BY_SIDE, tensors=(tensor,)), 10, allocate_buffers(SIDE_BY_SIDE, CPU))


def test_pages_between_others_cannot_be_split() -> None:
    with pytest.raises(InvalidArgumentError, match="pages that are not adjacent"):
        reshape_kv_cache(SIDE_BY_SIDE, 10, allocate_buffers(SIDE_BY_SIDE, CPU), kernel_block_sizes=[8, 8])


def tensors_of(*shared_by: tuple[str, ...]) -> KVCacheConfig:
    return replace(CONFIG, tensors=tuple(KVCacheTensor(10 * PAGE, names) for names in shared_by))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (tensors_of(("full.0", "window.0")), "layer 'full.1' is in no buffer"),
        (tensors_of(("full.0", "window.0"), ("full.1", "window.0")), "'window.0' is in two buffers"),
        (tensors_of(("full.0", "full.0"), ("full.1", "window.0")), "'full.0' is in two buffers, or twice in one"),
        (tensors_of(("full.0", "full.1"), ("window.0",)), "'full.1' overlaps with 'full.0' of the same group"),
        (tensors_of(("full.0", "window.0"), ("full.1", "x")), "layer 'x' is in no group"),
        (
            replace(CONFIG, groups=(CONFIG.groups[0], KVCacheGroup(replace(WINDOW, num_kv_heads=1), ("window.0",)))),
            "'window.0' has bytes 0 to 512 of a block, and blocks have 1024",
        ),
        (
            replace(CONFIG, groups=(CONFIG.groups[0], KVCacheGroup(ENCODER, ("window.0",)))),
            "layer 'window.0': a EncoderOnlyAttentionSpec has no tensors",
        ),
    ],
)  # fmt: skip
def test_layers_that_do_not_fit_the_buffers_are_refused(config: KVCacheConfig, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        reshape_kv_cache(config, 10, allocate_buffers(config, CPU))


FIRST, SECOND = (torch.zeros(10 * PAGE, dtype=torch.int8) for _ in range(2))
NOT_FLAT = r"buffers\[1\]: .* is not a one-dimensional int8 buffer"


@pytest.mark.parametrize(
    ("num_blocks", "buffers", "options", "why"),
    [
        (11, (FIRST, SECOND), {}, r"buffers\[0\]: layer 'full.0' needs 11 blocks of 1024 bytes"),
        (0, (FIRST, SECOND), {}, "num_blocks: 0"),
        (10, (FIRST,), {}, "buffers: 1 for 2 tensors"),
        (10, (FIRST, SECOND.view(torch.float16)), {}, NOT_FLAT),
        (10, (FIRST, SECOND.view(2, -1)), {}, NOT_FLAT),
        (10, (FIRST, torch.zeros(20 * PAGE, dtype=torch.int8)[::2]), {}, NOT_FLAT),
        (10, (FIRST, SECOND), {"kernel_block_sizes": [8]}, "kernel_block_sizes: 1 for 2 groups"),
        (10, (FIRST, SECOND), {"layouts": {"x": "flex"}}, "layouts: layer 'x' is in no group"),
    ],
)
def test_buffers_and_options_that_do_not_fit_are_refused(
    num_blocks: int, buffers: tuple[torch.Tensor, ...], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        reshape_kv_cache(CONFIG, num_blocks, buffers, **options)


def test_a_buffer_that_is_no_whole_number_of_blocks_is_refused() -> None:
    odd = replace(CONFIG, tensors=(CONFIG.tensors[0], KVCacheTensor(10 * PAGE + 1, ("full.1",))))
    why = r"tensors\[1\].size_bytes: layer 'full.1': 10241 bytes are not a multiple of 10"
    with pytest.raises(InvalidArgumentError, match=why):
        allocate_buffers(odd, CPU)


@dataclass
class Layer:
    kv_cache: LayerCache = ()


CACHES: dict[str, LayerCache] = {"a": torch.zeros(1), "b": (torch.zeros(2), torch.zeros(3))}


def test_layers_are_bound_to_their_views_and_to_those_they_share() -> None:
    layers = {name: Layer() for name in "abc"}
    bind_kv_cache(CACHES, layers, {"c": "a"})
    assert layers["a"].kv_cache is layers["c"].kv_cache is CACHES["a"]
    assert layers["b"].kv_cache is CACHES["b"]


@pytest.mark.parametrize(
    ("names", "shared", "why"),
    [
        ("a", {}, "layer 'b' has a cache, but the runner has no such layer"),
        ("abc", {}, "layer 'c' neither has nor shares a cache"),
        ("abc", {"c": "d"}, "layer 'c' shares with 'd', which has no cache"),
        ("abcd", {"c": "a", "d": "c"}, "layer 'd' shares with 'c', which has no cache"),
        ("ab", {"b": "a"}, "layer 'b' has its own cache"),
        ("ab", {"c": "a"}, "layer 'c' has a cache, but the runner"),
    ],
)
def test_missing_and_unknown_layers_are_refused(names: str, shared: dict[str, str], why: str) -> None:
    layers = {name: Layer() for name in names}
    with pytest.raises(InvalidArgumentError, match=why):
        bind_kv_cache(CACHES, layers, shared)
    assert all(layer.kv_cache == () for layer in layers.values())
