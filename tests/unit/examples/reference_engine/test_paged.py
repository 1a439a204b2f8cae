"""What is computed from blocks equals what is computed without any, and nothing else is ever read."""

import random

import pytest
import torch

from examples.reference_engine.config import VARIANTS, ReferenceConfig
from examples.reference_engine.dense import DenseModel
from examples.reference_engine.paged import gather_tokens
from support.reference import Rank, RunningRequest
from support.torch import on_each_device

LAYOUTS = ["flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd", "triton"]


def tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(128) for _ in range(count)]


def check(rank: Rank, dense: DenseModel, *requests: RunningRequest) -> None:
    """Compares the last step's logits of requests whose tokens were all computed."""
    assert rank.model.logits is not None
    expected = [dense.forward_dense(request.token_ids)[-1] for request in requests]
    torch.testing.assert_close(rank.model.logits, torch.stack(expected), rtol=1e-9, atol=1e-9)


@on_each_device
@pytest.mark.parametrize("chunk", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 7, 16, 50))])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_of_a_prompt(variant: str, chunk: int, device: torch.device) -> None:
    """Every chunk's last token is compared: the request knows no more tokens than are computed."""
    config = ReferenceConfig(variant)
    rank, dense = Rank(config, device, seed=chunk), DenseModel(config, device)
    prompt = tokens(random.Random(chunk), 50)  # noqa: S311 - a prompt
    request = RunningRequest(rank, "r", [])
    while len(request.token_ids) < len(prompt):
        begin = len(request.token_ids)
        request.token_ids += prompt[begin : begin + min(chunk, 48)]
        step = request.schedule(len(request.token_ids) - begin)
        rank.poison_all_but(request.blocks)
        chosen = rank.step(step)
        check(rank, dense, request)
        assert chosen == dense.greedy_tokens(request.token_ids, len(request.token_ids))


@on_each_device
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_side_by_side(variant: str, layout: str, device: torch.device) -> None:
    """Prompts and decodes of several requests in one step, in all layouts; rows come and go."""
    source = random.Random(layout)  # noqa: S311 - a schedule
    config = ReferenceConfig(variant, seed=1)
    rank, dense = Rank(config, device, layout), DenseModel(config, device)
    requests = [RunningRequest(rank, f"r{i}", tokens(source, source.randint(1, 30))) for i in range(4)]
    for round_ in range(12):
        source.shuffle(requests)
        chosen = requests[: source.randint(1, len(requests))]
        steps = []
        for request in chosen:
            left = len(request.token_ids) - request.num_computed_tokens
            steps.append(request.schedule(source.randint(1, min(left, 10))))
        rank.poison_all_but([block for request in requests for block in request.blocks])
        done = [r for r in chosen if r.num_computed_tokens == len(r.token_ids)]
        for request, token in zip(done, rank.step(*steps), strict=True):
            assert [token] == dense.greedy_tokens(request.token_ids, len(request.token_ids))
            request.token_ids.append(token)
        if round_ == 5:  # one goes, its row is taken by the next
            gone = requests.pop()
            requests.append(RunningRequest(rank, "late", tokens(source, 9)))
            rank.step(released=[gone.request_id])


@on_each_device
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hit_continues_the_blocks_of_another_request(variant: str, device: torch.device) -> None:
    """The second request starts from the first one's blocks, of this step or of one before; those behind are NaN."""
    source = random.Random(variant)  # noqa: S311 - prompts
    config = ReferenceConfig(variant)
    rank, dense = Rank(config, device), DenseModel(config, device)
    prefix = tokens(source, 32)
    first = RunningRequest(rank, "first", prefix)
    begun = [first.schedule(20), first.schedule(12)]
    rank.step(begun[0])
    second = RunningRequest(rank, "second", prefix + tokens(source, 5))
    second.take_prefix(first, 32)
    same_step = second.schedule(3)
    rank.step(begun[1], same_step)
    rest = second.schedule(2)
    rank.poison_all_but(second.blocks)
    rank.step(rest, released=["first"])
    check(rank, dense, second)


@pytest.mark.parametrize("variant", VARIANTS)
def test_held_blocks_are_read(variant: str) -> None:
    """The poison works: of each group, a block that is lost shows."""
    for group in range(len(Rank(ReferenceConfig(variant), torch.device("cpu")).specs)):
        rank = Rank(ReferenceConfig(variant), torch.device("cpu"))
        request = RunningRequest(rank, "r", tokens(random.Random(1), 23))  # noqa: S311 - a prompt
        rank.step(request.schedule(22))
        last = request.schedule(1)
        lost = request.tables[group][21 // rank.specs[group].block_size]
        rank.poison_all_but([block for block in request.blocks if block != lost])
        with pytest.raises(FloatingPointError, match="not finite"):
            rank.step(last)


def test_the_state_lies_at_the_end_of_each_block() -> None:
    """Any whole number of a prefix's blocks can be continued: each holds the state after its last token."""
    config = ReferenceConfig("mamba")
    rank, dense = Rank(config, torch.device("cpu")), DenseModel(config, torch.device("cpu"))
    source = random.Random(2)  # noqa: S311 - prompts
    prefix = tokens(source, 24)
    first = RunningRequest(rank, "first", prefix)
    rank.step(first.schedule(24))
    for end in range(4, 24, 4):
        other = RunningRequest(rank, f"r{end}", prefix[:end] + tokens(source, 3))
        other.take_prefix(first, end)
        rank.step(other.schedule(3))
        check(rank, dense, other)
        rank.step(released=[other.request_id])


def test_blocks_of_other_tokens_are_not_read() -> None:
    """Entries of the table that hold none of the tokens may be anything."""
    pages = torch.arange(12.0).view(3, 4, 1)
    blocks = torch.tensor([10**6, 2, 1, 10**6])
    assert gather_tokens(pages, blocks, 5, 11).flatten().tolist() == [9, 10, 11, 4, 5, 6]
