"""The cached blocks of both tiers of a pool in lent memory, beside what another engine computes for their tokens."""

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from engine.serving import Site, site
from kvpool.client.admin import AdminClient
from kvpool.v1 import admin_pb2

LAYERS = 2
FIRST, HOST = "first tier", "host memory"


def memory_of(place: Site) -> torch.Tensor:
    """The first tier: (layers, blocks, elements per layer)."""
    return _mapped(place, "memory").view(LAYERS, place.num_blocks, -1)


def cached_blocks(place: Site) -> Iterator[tuple[admin_pb2.BlockInfo, torch.Tensor]]:
    """Each cached block, and its contents where they lie: (layers, elements per layer)."""
    memory = memory_of(place)
    with AdminClient(place.service) as admin:
        blocks = [block for block in admin.blocks(place.pool) if block.block_hash]
    has_host = any(block.in_host_memory for block in blocks)
    host = _mapped(place, "host").view(-1, LAYERS, memory.shape[2]) if has_host else memory  # a slot has all layers
    for block in blocks:
        number = block.block_id
        yield block, host[number - place.num_blocks] if block.in_host_memory else memory[:, number]


def _mapped(place: Site, name: str) -> torch.Tensor:
    (path,) = place.memory_folder.glob(f"*/{place.pool}/0/{name}-*")
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.float32)


def computed_blocks(place: Site, prompts: Sequence[Sequence[int]], num_blocks: int) -> dict[bytes, torch.Tensor]:
    """What another engine computes for the blocks of prompts, by hash, in memory of another pool that has them all."""
    with site(place.service, num_blocks, pool="recomputed") as other:
        engine = other.engine()
        engine.wait(*[engine.ask(f"{i}", prompt, 1) for i, prompt in enumerate(prompts)])
        return {block.block_hash: contents.clone() for block, contents in cached_blocks(other)}


def wrong_blocks(place: Site, expected: Mapping[bytes, torch.Tensor]) -> tuple[list[int], Counter[str]]:
    """Compares each cached block; returns those with wrong contents, and how many there are of each tier."""
    wrong, compared = [], Counter[str]()
    for block, contents in cached_blocks(place):
        right = expected.get(block.block_hash)
        if right is None or not torch.allclose(contents, right, atol=1e-3):
            wrong.append(block.block_id)
        compared[HOST if block.in_host_memory else FIRST] += 1
    return wrong, compared
