"""A model whose keys, values and states lie in the service's blocks alone says what it says without any cache.

Real processes: a server, the ranks, and two schedulers that share the pool. Ranks begin with NaN in all their memory.
"""

import random

import pytest
import torch

from kvpool.client import connect
from kvpool.gpu_worker.reference.config import VARIANTS, ReferenceConfig
from kvpool.gpu_worker.reference.generate import Deployment, Prompts, generate, running_ranks
from kvpool.gpu_worker.reference.runner import RunnerLimits
from kvpool.gpu_worker.reference.step_link import StepLink, StepRefusedError
from kvpool.replay.executor import Scheduled
from support_server import running_server

OUTPUT_TOKENS = 16
NUM_BLOCKS = {"full": 34, "sliding": 64, "chunked": 60, "mla": 34, "mamba": 56}
"""So few that the schedulers take blocks from each other, and must preempt."""


def workloads() -> list[Prompts]:
    """Prompts over two beginnings, which both schedulers have."""
    source = random.Random(3)  # noqa: S311 - prompts
    beginnings = [[source.randrange(128) for _ in range(24)] for _ in range(2)]
    return [
        Prompts(
            [beginnings[i % 2] + [source.randrange(128) for _ in range(source.randint(3, 17))] for i in range(7)],
            OUTPUT_TOKENS,
        )
        for _ in range(2)
    ]


def check(deployment: Deployment) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with running_server() as address:
            done = generate(address, "reference", deployment, workloads())
            with connect(address) as client:
                info = client.get_pool("reference")
    finally:
        torch.set_num_threads(threads)
    counts = done.counts
    assert done.equal, [output for output in done.outputs if not output[1]]
    assert (counts.requests, counts.output_tokens) == (14, 14 * OUTPUT_TOKENS)
    assert counts.preemptions > 0
    assert 0 < counts.shared_hit_tokens < counts.hit_tokens
    assert (info.requests, info.free_blocks) == (0, deployment.num_blocks - 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_kinds_of_layers(variant: str) -> None:
    check(Deployment(ReferenceConfig(variant), num_blocks=NUM_BLOCKS[variant]))


def test_two_tensor_ranks() -> None:
    check(Deployment(ReferenceConfig("mamba"), tp_size=2, num_blocks=NUM_BLOCKS["mamba"], layout="flashinfer_hnd"))


def test_two_pipeline_ranks() -> None:
    check(Deployment(ReferenceConfig("sliding"), pp_size=2, num_blocks=NUM_BLOCKS["sliding"]))


def test_ranks_refuse_a_step_of_another_epoch() -> None:
    deployment = Deployment(ReferenceConfig("full", num_layers=1))
    with (
        running_ranks(deployment, deployment.plan(), 7, RunnerLimits(4, 64, 24)) as (socket, authkey),
        connect("embedded:") as client,
    ):
        config = deployment.pool_config("p")
        client.create_pool(config)
        with client.open_session("p") as session:
            request = session.request("r", [1, 2, 3])
            session.admit(request)
            stale, current = StepLink(socket, authkey, 6), StepLink(socket, authkey, 7)
            with pytest.raises(StepRefusedError, match="planned in epoch 6, the rank's blocks are of epoch 7"):
                stale.execute([Scheduled(request)], [])
            assert len(current.execute([Scheduled(request)], [])) == 1
            stale.close()
            current.close()
