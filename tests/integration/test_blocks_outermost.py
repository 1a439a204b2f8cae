"""A rank whose plan puts the layers of a block side by side: from the option to the views of the layers."""

import torch

from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.worker import Worker
from support.server import running_server
from support.torch import bytes_of
from support.waiting import DEADLINE_SECONDS

WIDE = FullAttentionSpec(16, 4, 16, "float32")  # 8,192 bytes
NARROW = FullAttentionSpec(16, 1, 16, "float32")  # 2,048 bytes
WINDOW = SlidingWindowSpec(16, 2, 16, "float32", sliding_window=64)  # 4,096 bytes
LAYERS = {"wide": WIDE, "narrow": NARROW, **{f"window.{i}": WINDOW for i in range(3)}}
BLOCK_BYTES = 8192 + 2048
EXPECTED = {"wide": (0, 8192), "narrow": (8192, 10_240), "window.0": (0, 4096), "window.2": (0, 4096)}


def test_a_rank_has_one_buffer_of_whole_blocks() -> None:
    with running_server() as address:
        options = RankGroupOptions(256, block_outermost=True)
        settings = WorkerSettings(address, "m", 0, 1, options, device="cpu", memory_bytes=100 * BLOCK_BYTES)
        layouts = dict.fromkeys(LAYERS, "triton")
        with Worker(settings, LAYERS, layouts=layouts) as worker:
            pool = worker.wait_ready(DEADLINE_SECONDS)
            (buffer,) = pool.buffers
            assert (pool.num_blocks, buffer.numel()) == (100, 100 * BLOCK_BYTES)
            assert [group.layer_names for group in pool.config.groups] == [
                ("wide", "narrow"),
                *((f"window.{i}",) for i in range(3)),
            ]
            for name, (start, end) in EXPECTED.items():
                view = pool.kv_caches[name]
                assert isinstance(view, torch.Tensor)
                buffer.zero_()
                bytes_of(view[7:8]).fill_(1)
                blocks = buffer.view(100, BLOCK_BYTES)
                assert blocks[7, start:end].all()
                assert blocks.count_nonzero() == end - start
