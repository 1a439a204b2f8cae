"""Allocation options, as a session encodes and applies them; and requests whose engine hashes its blocks itself."""

from dataclasses import replace

import pytest

from kvpool.client import Answer, Client, KVCacheGroup, Outcome, Request, Session, SlidingWindowSpec
from kvpool.client.blocking import run
from kvpool.client.hashing import BlockHasher
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import BlockHash, BlockId, RequestNumber
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from kvpool.core.steps.columns import Operation, Step, StepResult
from kvpool.wire.steps import step_from_proto, step_to_proto
from support.server import pool_config

NAMES = (
    "num_external_tokens",
    "num_in_flight_tokens",
    "num_reserved_blocks",
    "num_watermark_blocks",
    "full_sequence_must_fit",
)
WINDOW = KVCacheGroup(SlidingWindowSpec(4, sliding_window=5), ("w",))
FULL = KVCacheGroup(FullAttentionSpec(4), ("f",))


class OpenTransport(EmbeddedTransport):
    """Records every step that is sent, and returns the pool's block tables of a request."""

    def __init__(self, *groups: KVCacheGroup) -> None:
        super().__init__()
        self.sent: list[Step] = []
        config = pool_config()
        run(self.create_pool(replace(config, groups=groups or config.groups)))

    async def apply(self, session_id: str, step: Step) -> StepResult:
        self.sent.append(step)
        return await super().apply(session_id, step)

    def open(self) -> Session:
        return Client(self).open_session("m")

    def tables(self, session: Session, request: Request) -> list[list[int]]:
        behind = self._state.sessions.find(session.session_id, 0.0)[1].by_number[RequestNumber(request.number)]
        assert request.credit_tokens <= behind.credit_tokens
        return [list(table.block_ids) for table in behind.tables]


@pytest.fixture
def transport() -> OpenTransport:
    return OpenTransport()


@pytest.fixture
def session(transport: OpenTransport) -> Session:
    return transport.open()


def columns(step: Step) -> dict[str, list[int]]:
    return {name: column for name in NAMES if (column := getattr(step, name))}


def allocate(
    session: Session,
    request: Request,
    new: int,
    options: AllocationOptions,
    computed: ComputedBlocks | None = None,
) -> Answer:
    with session.step() as step:
        return step.allocate_slots(request, new, computed=computed, options=options)  # answered as the block ends


def test_default_options_have_no_columns(transport: OpenTransport, session: Session) -> None:
    for options in (DEFAULT_OPTIONS, AllocationOptions()):
        with session.step() as step:
            step.admit(session.request(f"r{len(transport.sent)}", range(5)), options=options)
        assert columns(transport.sent[-1]) == {}


def test_an_option_column_has_an_entry_for_every_operation(transport: OpenTransport, session: Session) -> None:
    requests = [session.request(f"r{i}", range(i, i + 5)) for i in range(3)]
    with session.step() as step:
        step.admit(requests[0])
        step.admit(requests[1], options=AllocationOptions(num_reserved_blocks=1, full_sequence_must_fit=True))
        step.admit(requests[2])
    sent = transport.sent[-1]
    assert (sent.operations, sent.declares) == ([Operation.ADMIT] * 3, [True] * 3)
    assert columns(sent) == {"num_reserved_blocks": [0, 1, 0], "full_sequence_must_fit": [0, 1, 0]}


def test_option_columns_have_entries_for_batches(transport: OpenTransport, session: Session) -> None:
    requests = [session.request(f"r{i}", range(4)) for i in range(3)]
    for request in requests:
        session.admit(request)
    with session.step() as step:
        step.decode(requests[:2], [7, 7])
        step.allocate_slots(requests[2], 1, options=AllocationOptions(num_watermark_blocks=2))
    assert len(transport.sent[-1].operations) == 3
    assert columns(transport.sent[-1]) == {"num_watermark_blocks": [0, 0, 2]}


def test_options_survive_the_wire() -> None:
    step = Step(3, launched_sequence=2, operations=[3, 4], num_external_tokens=[0, 5], num_in_flight_tokens=[1, 0])
    step.num_reserved_blocks, step.num_watermark_blocks = [7, 0], [0, 8]
    step.full_sequence_must_fit = [0, True]  # type: ignore[list-item]  # as the client pads it
    assert step_from_proto(step_to_proto(step, "s")) == step


def test_launched_steps_are_sent_with_executed_steps(transport: OpenTransport, session: Session) -> None:
    request = session.request("r", range(5))
    session.admit(request)
    with session.step(launched_sequence=1, executed_sequence=1) as step:
        step.preempt(request)
    assert (transport.sent[-1].launched_sequence, transport.sent[-1].executed_sequence) == (1, 1)


def test_tokens_in_flight_do_not_prevent_a_decode_on_credit(transport: OpenTransport, session: Session) -> None:
    request = session.request("r", range(5))
    session.admit(request)
    num_sent = len(transport.sent)
    request.append([5])
    assert allocate(session, request, 1, AllocationOptions(num_in_flight_tokens=1)).ok
    assert (len(transport.sent), request.num_computed_tokens) == (num_sent, 6)


@pytest.mark.parametrize(
    "options",
    [
        AllocationOptions(num_reserved_blocks=1),
        AllocationOptions(num_watermark_blocks=1),
        AllocationOptions(full_sequence_must_fit=True),
    ],
)
def test_other_options_are_sent_even_within_credit(
    transport: OpenTransport, session: Session, options: AllocationOptions
) -> None:
    request = session.request("r", range(5))
    session.admit(request)
    num_sent = len(transport.sent)
    assert allocate(session, request, 1, options).ok
    assert len(transport.sent) == num_sent + 1


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW), (WINDOW, FULL)])
@pytest.mark.parametrize("num_hit_tokens", [0, 8, 16])
@pytest.mark.parametrize("num_external_tokens", [1, 4, 9, 12])
@pytest.mark.parametrize("num_new_tokens", [0, 1, 6])
def test_tables_with_external_tokens_equal_the_pools(
    groups: tuple[KVCacheGroup, ...], num_hit_tokens: int, num_external_tokens: int, num_new_tokens: int
) -> None:
    transport = OpenTransport(*groups)
    session = transport.open()
    session.admit(session.request("filler", range(num_hit_tokens)) if num_hit_tokens else session.request("x", [99]))
    request = session.request("r", range(40))
    with session.step() as step:
        found = step.get_computed_blocks(request)
    assert found.num_hit_tokens == num_hit_tokens
    hit = tuple([BlockId(block_id) for block_id in ids] for ids in found.hit_blocks)
    computed = ComputedBlocks(hit, num_hit_tokens) if num_hit_tokens else None
    assert allocate(session, request, num_new_tokens, AllocationOptions(num_external_tokens), computed).ok
    assert request.block_ids == transport.tables(session, request)
    assert request.num_computed_tokens == num_hit_tokens + num_external_tokens + num_new_tokens
    for _ in range(8):
        allocate(session, request, 1, DEFAULT_OPTIONS)
        assert request.block_ids == transport.tables(session, request)


def test_tables_with_tokens_in_flight_equal_the_pools() -> None:
    transport = OpenTransport(FULL, WINDOW)
    session = transport.open()
    request = session.request("r", range(40))
    session.allocate_slots(request, 9)
    for num_in_flight in (9, 9, 4, 12, 2, 0, 30):
        assert allocate(session, request, 3, AllocationOptions(num_in_flight_tokens=num_in_flight)).ok
        assert request.block_ids == transport.tables(session, request)


def test_after_a_refusal_tables_equal_the_pools_again_with_the_next_answer() -> None:
    transport = OpenTransport(WINDOW)
    session = transport.open()
    request = session.request("r", range(40))
    session.allocate_slots(request, 16)
    refused = allocate(session, request, 4, AllocationOptions(num_reserved_blocks=10**4, num_in_flight_tokens=8))
    assert refused.outcome is Outcome.NO_BLOCKS
    assert request.block_ids == transport.tables(session, request) == [[0, 2, 3, 4]]
    whole = AllocationOptions(
        num_watermark_blocks=10**4, full_sequence_must_fit=True
    )  # refused before anything is freed
    assert allocate(session, request, 4, whole).outcome is Outcome.NO_BLOCKS
    assert request.block_ids == transport.tables(session, request) == [[0, 2, 3, 4]]
    whole = AllocationOptions(
        num_reserved_blocks=10**4, full_sequence_must_fit=True
    )  # refused after: the session does not know
    assert allocate(session, request, 4, whole).outcome is Outcome.NO_BLOCKS
    assert transport.tables(session, request) == [[0, 0, 0, 4]]
    assert allocate(session, request, 4, DEFAULT_OPTIONS).ok
    assert request.block_ids == transport.tables(session, request)


def test_free_blocks_are_those_of_the_last_answer(session: Session) -> None:
    assert session.free_blocks == 0
    request = session.request("r", range(9))
    session.admit(request)
    num_free = session.free_blocks
    assert num_free == session.config.num_blocks - 1 - 3
    session.free(request)
    assert session.free_blocks == num_free + 3


def test_a_builder_made_by_the_caller_is_sent(session: Session) -> None:
    builder = session.new_step()
    answer = builder.admit(session.request("r", range(5)))
    session.send(builder)
    assert (answer.ok, session.sequence) == (True, 1)


def test_a_request_hashed_elsewhere_is_read_as_it_grows(transport: OpenTransport, session: Session) -> None:
    config = session.config
    hasher = BlockHasher(config.hash_scheme, config.hash_block_size)
    token_ids, hashes = list(range(5)), list[BlockHash]()

    def grow(more: list[int]) -> None:
        token_ids.extend(more)
        hasher.extend(hashes, token_ids)

    grow([])
    request = session.request_hashed_elsewhere("r", token_ids, hashes, lora_name="l")
    assert session.admit(request)
    assert (transport.sent[-1].lora_names, transport.sent[-1].block_hashes) == (["l"], hashes[0])
    for i in range(11):
        grow([5 + i])
        assert allocate(session, request, 1, DEFAULT_OPTIONS).ok
    with session.step() as step:
        step.decode([request])
    grow([16])
    session.free(request)
    assert (token_ids, len(hashes)) == (list(range(17)), 4)  # neither was changed
    alike = session.request("s", range(18))
    assert session.get_computed_blocks(alike).num_tokens == 16


def test_requests_hashed_elsewhere_decode_with_others(session: Session) -> None:
    config = session.config
    hasher = BlockHasher(config.hash_scheme, config.hash_block_size)
    token_ids, hashes = list(range(7)), list[BlockHash]()
    hasher.extend(hashes, token_ids)
    requests = [session.request_hashed_elsewhere("r", token_ids, hashes), session.request("s", range(7))]
    for request in requests:
        session.admit(request)
    for _ in range(3):
        token_ids.append(9)
        hasher.extend(hashes, token_ids)
        requests[1].append([9])
        with session.step() as step:
            decodes = step.decode(requests)
        assert not decodes.refused
    assert requests[0].hashes == requests[1].hashes == hashes
    assert len(hashes) == 2
