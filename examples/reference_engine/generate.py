"""Runs a complete deployment of the reference model on a service, and checks the generated tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from examples.reference_engine.dense import DenseModel
from examples.reference_engine.deployment import Deployment, running_ranks
from examples.reference_engine.prompts import Prompts
from examples.reference_engine.rank import START_SECONDS
from examples.reference_engine.schedulers import SchedulerOptions, play_concurrently
from examples.reference_engine.step_link import StepLink
from kvpool.client import PoolInfo, connect
from kvpool.replay import ChildError
from kvpool.replay.result import Counts


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a run.

    Attributes:
        counts: Counts over all schedulers: requests, tokens, hits, preemptions.
        equal_requests: Number of requests whose tokens all equal those of the model without a cache.
        outputs: Prompt and output of each request, by scheduler.
        pool: The pool after all requests.
    """

    counts: Counts
    equal_requests: int
    outputs: list[tuple[list[int], list[int]]]
    pool: PoolInfo

    @property
    def equal(self) -> bool:
        """Whether every request of every scheduler finished with the right tokens."""
        return 0 < self.counts.requests == self.equal_requests


def generate(
    address: str,
    pool: str,
    deployment: Deployment,
    workloads: Sequence[Prompts],
    advance: Callable[[int], object] = lambda _: None,
) -> Generation:
    """Forms a pool of ranks, runs each workload in its own scheduler process, and checks all tokens.

    A scheduler starts after the previous one has finished two requests, so that it can hit their blocks.

    Args:
        address: Address of the service.
        pool: Name of a new pool.
        deployment: The ranks.
        workloads: One per scheduler.
        advance: Called with the number of newly finished requests.

    Raises:
        ChildError: A rank did not start, or a scheduler ended too early; states the reason.
        KvpoolError: The service refused a call.
    """
    complaints: list[str] = []
    with connect(address) as client, running_ranks(address, pool, deployment) as ranks:
        client.wait_until_ready(pool, timeout_seconds=START_SECONDS)
        options = SchedulerOptions(
            address,
            pool,
            deployment.max_num_seqs,
            deployment.max_num_batched_tokens,
            partial(StepLink.of_session, ranks.socket, ranks.authkey),
            start_after_requests=2,
        )
        played = play_concurrently(workloads, options, advance, complaints.append)
        info = client.get_pool(pool)
    if complaints:
        raise ChildError("; ".join(complaints))
    counts = Counts()
    outputs = []
    for scheduler in played:
        if scheduler:
            counts.add(scheduler.counts)
            outputs += cast("Prompts", scheduler.share).outputs
    dense = DenseModel(deployment.config, torch.device(deployment.device))
    right = [dense.greedy_tokens(prompt + output, len(prompt))[:-1] == output for prompt, output in outputs]
    return Generation(counts, right.count(True), outputs, info)
