"""A model whose keys, values and states lie in the service's blocks alone says what it says without any cache.

Real processes: a server, the ranks, and two schedulers that share the pool. Ranks begin with NaN in all their memory.
"""

import random
from dataclasses import replace

import pytest
import torch

from examples.reference_engine.config import VARIANTS, ReferenceConfig
from examples.reference_engine.deployment import Deployment, running_ranks
from examples.reference_engine.generate import generate
from examples.reference_engine.prompts import Prompts
from examples.reference_engine.step_link import StepLink, StepRefusedError
from kvpool.client import connect
from kvpool.replay import ChildError
from kvpool.replay.executor import Scheduled
from kvpool.replay.result import Counts
from support.server import running_server

OUTPUT_TOKENS = 16
SCARCE = {"full": 28, "sliding": 58, "chunked": 50, "mla": 28, "mamba": 46}
"""Blocks: so few that the schedulers take them from each other, and must preempt."""
PLENTY = 250
"""Blocks: enough that the prefixes of one scheduler are still cached when the other looks them up."""


def workloads() -> list[Prompts]:
    """Prompts over two beginnings, which both schedulers have."""
    source = random.Random(3)  # noqa: S311 - prompts
    beginnings = [[source.randrange(128) for _ in range(24)] for _ in range(2)]
    return [
        Prompts(
            [beginnings[i % 2] + [source.randrange(128) for _ in range(source.randint(3, 17))] for i in range(10)],
            OUTPUT_TOKENS,
        )
        for _ in range(2)
    ]


def run(deployment: Deployment) -> Counts:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with running_server() as address:
            done = generate(address, "reference", deployment, workloads())
    finally:
        torch.set_num_threads(threads)
    assert done.equal, [output for output in done.outputs if not output[1]]
    assert (done.counts.requests, done.counts.output_tokens) == (20, 20 * OUTPUT_TOKENS)
    assert (done.pool.requests, done.pool.free_blocks) == (0, deployment.num_blocks - 1)
    return done.counts


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_schedulers_that_must_preempt(variant: str) -> None:
    assert run(Deployment(ReferenceConfig(variant), num_blocks=SCARCE[variant])).preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_schedulers_that_hit_each_others_prefixes(variant: str) -> None:
    counts = run(Deployment(ReferenceConfig(variant), num_blocks=PLENTY))
    assert 0 < counts.shared_hit_tokens < counts.hit_tokens


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [SCARCE["mamba"], PLENTY])
def test_two_tensor_ranks(num_blocks: int) -> None:
    run(Deployment(ReferenceConfig("mamba"), tp_size=2, num_blocks=num_blocks, layout="flashinfer_hnd"))


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [SCARCE["sliding"], PLENTY])
def test_two_pipeline_ranks(num_blocks: int) -> None:
    run(Deployment(ReferenceConfig("sliding"), pp_size=2, num_blocks=num_blocks))


@pytest.mark.slow
def test_ranks_refuse_a_step_of_another_epoch() -> None:
    deployment = Deployment(ReferenceConfig("full", num_layers=1))
    with (
        running_server() as address,
        running_ranks(address, "reference", deployment) as ranks,
        connect(address) as client,
        client.open_session("reference") as session,
        StepLink(ranks.socket, ranks.authkey, replace(session.table_lease, epoch=session.epoch + 1)) as stale,
        StepLink.of_session(ranks.socket, ranks.authkey, session) as current,
    ):
        request = session.request("r", [1, 2, 3])
        session.admit(request)
        with pytest.raises(StepRefusedError, match="2 is not the current epoch, 1"):
            stale.execute([Scheduled(request)], [])
        assert len(current.execute([Scheduled(request)], [])) == 1


@pytest.mark.slow
def test_ranks_that_cannot_form_a_pool_report_the_reason() -> None:
    deployment = Deployment(ReferenceConfig("full"), num_blocks=5)
    with running_server() as address, pytest.raises(ChildError, match="ONE_REQUEST_DOES_NOT_FIT"):
        generate(address, "reference", deployment, workloads())
