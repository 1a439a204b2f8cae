"""Rule numbers are those of core/ranks/membership.py."""

from dataclasses import replace

import pytest

from kvpool.core.errors import (
    AbortedError,
    InvalidArgumentError,
    KvpoolError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.ranks.effects import EpochPassed, PoolOpened, PoolResumed, PoolSuspended
from kvpool.core.ranks.messages import (
    MAX_EPOCH_LEAD,
    MAX_MAPPING_PROCESSES,
    Allocated,
    HeldTensors,
    LinkId,
    MappingProcess,
    Planned,
    PoolState,
    PoolStatus,
    Rank,
    RankState,
    RankTiming,
    Ready,
    Registration,
)
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import HashScheme, ReuseOrder
from kvpool.server.cluster.shard_member import EPOCHS_PER_TERM
from support.ranks import BLOCK_BYTES, LAYER, LAYERS, OPTIONS, TIMING, Gathering, registration
from support.refusals import refused

OTHER_LAYERS = {**LAYERS, "layer.1": FullAttentionSpec(16, 4, 64, "bfloat16")}


def held(epoch: int = 1, num_blocks: int = 100) -> HeldTensors:
    return HeldTensors(epoch, num_blocks)


def test_a_pool_opens_when_all_ranks_have_allocated(world: Gathering) -> None:
    first = world.register(registration(0))
    assert isinstance(world.last(first), PoolStatus)
    assert not world.members.was_open
    second = world.register(registration(1))
    plans = [world.last(first), world.last(second)]
    assert all(isinstance(plan, Planned) and plan.config.num_blocks == 100 and plan.epoch == 1 for plan in plans)
    world.allocate(first)
    assert not world.pool, "rule 1"
    world.allocate(second)
    assert world.members.state is PoolState.READY
    assert (world.epoch, world.num_blocks) == (1, 100)
    assert [world.last(first), world.last(second)] == [Ready(1, 100, 1024) for link in (first, second)]


def test_the_pool_shrinks_to_the_smallest_allocation_of_a_rank(world: Gathering) -> None:
    links = world.register_all()
    world.allocate(links[0])
    world.allocate(links[1], 77)
    assert world.num_blocks == 77
    assert world.expect(links[0], Ready).num_blocks == 77


def test_a_pool_too_small_for_one_request_fits_a_shorter_one_if_allowed(world: Gathering) -> None:
    options = replace(OPTIONS, auto_fit_max_model_len=True)
    links = [world.register(registration(rank, options=options)) for rank in range(2)]
    world.allocate(links[0], 21)
    world.allocate(links[1])
    assert (world.opened.num_blocks, world.opened.max_model_len) == (21, 320)


def test_a_pool_too_small_for_one_request_is_refused_to_all_ranks(world: Gathering) -> None:
    links = world.register_all()
    world.allocate(links[0], 21)
    world.allocate(links[1])
    for link in links:
        assert world.expect(link, InvalidArgumentError).reason == "ONE_REQUEST_DOES_NOT_FIT"
    assert not world.members.registry
    assert not world.pool


def test_a_plan_that_cannot_be_made_ends_all_ranks_with_the_planners_error(world: Gathering) -> None:
    links = [world.register(registration(rank, blocks=3 if rank else 100)) for rank in range(2)]
    errors = [world.last(link) for link in links]
    assert all(isinstance(e, InvalidArgumentError) and e.field == "ranks[1].available_bytes" for e in errors)
    assert not world.members.registry


def test_more_blocks_than_the_servers_limit_are_refused() -> None:
    world = Gathering(max_blocks=90)
    link = world.register(registration(0, 1))
    assert world.expect(link, InvalidArgumentError).reason == "TOO_MANY_BLOCKS"
    link = world.register(registration(0, 1, options=replace(OPTIONS, num_blocks_override=90)))
    world.allocate(link)
    assert world.num_blocks == 90


def test_pipeline_stages_register_different_layers(world: Gathering) -> None:
    links = [world.register(registration(rank, layers={f"layer.{rank}": LAYER})) for rank in range(2)]
    plan = world.expect(links[1], Planned)
    assert [group.layer_names for group in plan.config.groups] == [("layer.1",)]
    world.allocate_all(*links)
    assert world.opened.groups[0].layer_names == ("layer.0", "layer.1")


LOSSES = pytest.mark.parametrize("by", ["break", "silence"])


def lose(world: Gathering, lost: object, others: list, by: str) -> None:  # type: ignore[type-arg]
    if by == "break":
        world.break_link(lost)  # type: ignore[arg-type]
        return
    world.now_seconds += 4.0
    world.beat(*others)
    world.wait(1.5)


def beat_later(world: Gathering, link: LinkId) -> None:
    world.now_seconds += 4.0
    world.beat(link)
    world.wait(0.0)


@LOSSES
def test_a_lost_rank_suspends_the_pool_and_keeps_the_epoch(by: str, world: Gathering, links: list[LinkId]) -> None:
    lose(world, links[1], links[:1], by)
    assert world.members.state is PoolState.DEGRADED
    assert isinstance(world.pool[-1], PoolSuspended)
    assert world.members.epoch == 1
    sent = world.expect(links[0], PoolStatus)
    assert (sent.state, sent.absent_ranks) == (PoolState.DEGRADED, (1,))
    state = RankState.LOST if by == "break" else RankState.SILENT
    assert world.rank_states == [RankState.READY, state]


@LOSSES
def test_rule_4_a_process_that_returns_in_time_loses_nothing(by: str, world: Gathering, links: list[LinkId]) -> None:
    lose(world, links[1], links[:1], by)
    world.now_seconds += 3.0
    world.beat(links[0])
    if by == "silence":
        world.beat(links[1])
    else:
        world.register(registration(1, held=held()))
    assert [type(effect) for effect in world.pool] == [PoolOpened, PoolSuspended, PoolResumed]
    assert world.members.state is PoolState.READY
    assert world.expect(links[0], Ready).epoch == 1


@pytest.mark.parametrize(
    "registered",
    [
        registration(1),
        registration(1, held=held(epoch=2)),
        registration(1, held=held(num_blocks=99)),
        registration(1, held=held(), layers={**LAYERS, "layer.2": LAYER}),
    ],
    ids=["without tensors", "of another epoch", "other tensors", "other layers"],
)
def test_rule_3_a_process_that_returns_without_contents_starts_a_new_epoch(registered: Registration) -> None:
    world = Gathering()
    links = world.form()
    world.break_link(links[1])
    back = world.register(registered)
    assert world.pool[-1] == EpochPassed(2)
    world.allocate_all(links[0], back)
    assert world.epoch == max(2, registered.held.epoch + 1 if registered.held else 0)
    assert world.is_serving


def test_rule_4_by_default_a_rank_may_be_away_for_a_minute() -> None:
    world = Gathering(RankTiming())
    (link,) = world.form(1)
    world.break_link(link)
    world.wait(60.0)
    world.register(registration(0, 1, held=held()))
    assert (world.is_serving, world.members.epoch) == (True, 1)


@LOSSES
def test_rule_3_a_rank_that_does_not_return_is_given_up_after_the_grace_time(by: str, world: Gathering) -> None:
    links = world.form()
    lose(world, links[1], links[:1], by)
    for _ in range(7):
        beat_later(world, links[0])
    assert EpochPassed(2) not in world.pool
    beat_later(world, links[0])
    assert world.pool[-1] == EpochPassed(2)
    assert world.members.state is PoolState.DEGRADED
    assert world.rank_states == [RankState.REGISTERED, RankState.ABSENT]
    if by == "silence":
        assert isinstance(world.last(links[1]), AbortedError)
        with pytest.raises(AbortedError):
            world.members.heartbeat(links[1], 1, world.now_seconds)


def test_a_successor_gets_a_new_plan_and_all_others_too(world: Gathering, links: list[LinkId]) -> None:
    world.break_link(links[1])
    successor = world.register(registration(1, boot_id="successor", blocks=80))
    assert world.pool[-1] == EpochPassed(2)
    plan = world.expect(links[0], Planned)
    assert (plan.epoch, plan.config.num_blocks) == (2, 80)
    world.allocate(links[0], 100)  # it keeps its tensors
    world.allocate(successor)
    assert (world.epoch, world.num_blocks, world.is_serving) == (2, 80, True)


def test_a_successor_that_cannot_be_planned_with_is_refused_alone(world: Gathering, links: list[LinkId]) -> None:
    world.break_link(links[1])
    successor = world.register(registration(1, boot_id="successor", blocks=3))
    assert isinstance(world.last(successor), InvalidArgumentError)
    assert world.members.state is PoolState.DEGRADED
    world.beat(links[0])
    again = world.register(registration(1, boot_id="another-one"))
    world.allocate_all(links[0], again)
    assert world.is_serving


def test_the_rank_at_fault_is_refused_not_the_newest_one(world: Gathering) -> None:
    links = world.form(3)
    for link in links[1:]:
        world.break_link(link)
    poor = world.register(registration(1, 3, boot_id="poor-one", blocks=3))
    last = world.register(registration(2, 3, boot_id="last-one"))
    assert world.expect(poor, InvalidArgumentError).field == "ranks[1].available_bytes"
    better = world.register(registration(1, 3, boot_id="better-one"))
    world.allocate_all(links[0], better, last)
    assert world.is_serving


def test_a_rank_lost_while_others_allocate_can_return_and_gets_a_new_plan(world: Gathering) -> None:
    links = world.register_all()
    world.allocate(links[0])
    world.break_link(links[1])
    assert world.rank_states == [RankState.REGISTERED, RankState.ABSENT]
    back = world.register(registration(1))
    assert world.expect(links[0], Planned).epoch == 2
    world.allocate_all(links[0], back)
    assert (world.epoch, world.is_serving) == (2, True)


def test_an_answer_to_an_earlier_plan_is_ignored(world: Gathering) -> None:
    links = world.register_all()
    world.break_link(links[1])
    world.register(registration(1))
    before = world.snapshot()
    world.do(world.members.initialized(links[0], Allocated(1, 50, 1)))
    assert world.snapshot() == before


@pytest.mark.parametrize(
    ("ranks", "epoch"),
    [
        ([registration(rank, held=held(epoch=6 + rank)) for rank in range(2)], 8),
        ([replace(registration(rank), last_epoch=6 * rank) for rank in range(2)], 7),  # none holds tensors
    ],
)
def test_rule_3_ranks_carry_the_epoch_over_a_restart_of_the_server(ranks: list[Registration], epoch: int) -> None:
    world = Gathering()
    world.allocate_all(*map(world.register, ranks))
    assert world.epoch == epoch


def test_rule_3_holds_in_a_shard_with_a_much_lower_term(world: Gathering) -> None:
    """The shard of the ranks was removed, and the pool is created again in another one."""
    last_epoch = 2**12 * EPOCHS_PER_TERM
    too_high = replace(registration(0, 1), last_epoch=world.members.epoch + MAX_EPOCH_LEAD + 1)
    refuse(world, too_high, InvalidArgumentError, "INVALID_VALUE", "last_epoch")
    world.allocate(world.register(replace(registration(0, 1), last_epoch=last_epoch)))
    assert world.epoch == last_epoch + 1


def test_a_silent_rank_that_returns_after_another_was_replaced_gets_a_plan(world: Gathering) -> None:
    links = world.form()
    lose(world, links[0], links[1:], "silence")
    world.break_link(links[1])
    successor = world.register(registration(1, boot_id="successor"))
    assert isinstance(world.last(successor), PoolStatus)
    world.beat(links[0])
    world.allocate_all(links[0], successor)
    assert (world.epoch, world.is_serving) == (2, True)


def test_giving_up_one_lost_rank_gives_up_all_lost_ranks(world: Gathering) -> None:
    links = world.form(3)
    world.break_link(links[1])
    world.break_link(links[2])
    successor = world.register(registration(1, 3, boot_id="successor"))
    infos = world.members.registry.rank_infos()
    assert [info.state for info in infos] == [RankState.REGISTERED, RankState.REGISTERED, RankState.ABSENT]
    assert [info.num_blocks for info in infos] == [0, 0, 0]
    assert isinstance(world.last(successor), PoolStatus), "no plan may be sent while a rank is absent"


def test_a_rank_that_leaves_is_given_up_at_once(world: Gathering, links: list[LinkId]) -> None:
    world.do(world.members.leave(links[0]))
    assert world.pool[-1] == EpochPassed(2)
    world.break_link(links[0])
    assert world.members.registry.rank_infos()[0].state is RankState.ABSENT


def test_a_group_that_all_ranks_left_can_be_formed_with_other_options(world: Gathering) -> None:
    for link in world.form():
        world.do(world.members.leave(link))
    options = replace(OPTIONS, max_model_len=512)
    link = world.register(registration(0, 1, options=options))
    world.allocate(link)
    assert (world.epoch, world.members.registry.world_size, world.members.registry.options) == (2, 1, options)


def test_a_group_whose_ranks_are_all_lost_can_be_formed_with_other_options(world: Gathering) -> None:
    for link in world.form():
        world.break_link(link)
    options = replace(OPTIONS, max_model_len=512)
    first = world.register(registration(2, 3, boot_id="another-2", options=options))
    assert world.pool[-1] == EpochPassed(2)
    refuse(world, registration(0, held=held()), WrongStateError, "RANKS_DISAGREE", "register.world_size")
    others = [world.register(registration(rank, 3, boot_id=f"another-{rank}", options=options)) for rank in range(2)]
    world.allocate_all(first, *others)
    assert (world.epoch, world.is_serving, world.members.registry.options) == (2, True, options)


def test_while_a_rank_lives_the_successor_of_a_lost_one_must_agree_with_it(world: Gathering) -> None:
    world.break_link(world.form()[1])
    options = replace(OPTIONS, max_model_len=512)
    registered = registration(1, boot_id="successor", options=options)
    refuse(world, registered, WrongStateError, "RANKS_DISAGREE", "register.options.max_model_len")


def test_ranks_that_fall_silent_together_are_reported_in_one_message_per_rank(world: Gathering) -> None:
    links = world.form(100)
    sent = {link: len(world.sent[link]) for link in links}
    world.now_seconds += 4.0
    world.beat(*links[:10])
    world.wait(2.0)
    assert world.members.registry.absent == tuple(range(10, 100))
    for link in links[:10]:
        answer, status = world.sent[link][sent[link] :]
        assert isinstance(answer, PoolStatus)
        assert isinstance(status, PoolStatus)
        assert status.absent_ranks == tuple(range(10, 74)), "the first 64 of them"
    world.break_link(links[0])
    assert isinstance(world.sent[links[1]][-1], PoolStatus)
    assert len(world.sent[links[1]]) == sent[links[1]] + 2, "the answer to the next heartbeat reports the others"


def test_a_new_stream_of_the_same_process_takes_over(world: Gathering, links: list[LinkId]) -> None:
    others = len(world.sent[links[1]])
    newer = world.register(registration(0, held=held()))
    assert world.last(newer) == Ready(1, 100, 1024)
    assert len(world.sent[links[1]]) == others, "nothing has changed for them"
    assert world.expect(links[0], AbortedError).reason == "STREAM_SUPERSEDED"
    world.break_link(links[0])
    assert world.is_serving
    world.beat(newer)


def test_a_forming_rank_that_falls_silent_is_given_up(world: Gathering) -> None:
    link = world.register(registration(0))
    world.wait(6.0)
    assert isinstance(world.last(link), AbortedError)
    assert not world.members.registry


def test_the_next_deadline_is_the_nearest(world: Gathering) -> None:
    assert world.members.next_deadline_seconds == float("inf")
    links = world.form()
    assert world.members.next_deadline_seconds == world.now_seconds + 5.0
    world.break_link(links[0])
    world.now_seconds += 4.0
    world.beat(links[1])
    assert world.members.next_deadline_seconds == world.now_seconds + 5.0


def refuse(world: Gathering, registered: Registration, kind: type[KvpoolError], reason: str, field: str) -> None:
    with world.refuses(kind, field=field, reason=reason):
        world.register(registered)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"world_size": 0}, "world_size"),
        ({"world_size": 5000}, "world_size"),
        ({"rank": Rank(2)}, "rank"),
        ({"rank": Rank(-1)}, "rank"),
        ({"boot_id": "short"}, "boot_id"),
        ({"layers": {}}, "layers"),
        ({"available_bytes": 2**61}, "available_bytes"),
        ({"last_epoch": -1}, "last_epoch"),
        ({"last_epoch": 2**53}, "last_epoch"),  # would leave no epochs for this pool, and those after it
        ({"held": HeldTensors(0, 5), "last_epoch": 1}, "held.epoch"),
        ({"held": HeldTensors(2, 5), "last_epoch": 1}, "held.epoch"),
        ({"held": HeldTensors(1, 1), "last_epoch": 1}, "held.num_blocks"),
        ({"device": "x" * 257}, "device"),
        ({"options": replace(OPTIONS, max_model_len=0)}, "options.max_model_len"),
        ({"options": replace(OPTIONS, max_num_batched_tokens=0)}, "options.max_num_batched_tokens"),
        ({"options": replace(OPTIONS, decode_context_parallel_size=2000)}, "options.decode_context_parallel_size"),
        ({"options": replace(OPTIONS, num_blocks_override=-1)}, "options.num_blocks_override"),
        ({"options": replace(OPTIONS, hash_scheme=HashScheme(size_bytes=3))}, "options.hash_scheme.size_bytes"),
    ],
)
def test_a_registration_out_of_range_is_refused(changes: dict[str, object], field: str, world: Gathering) -> None:
    world.register(registration(0))
    registered = replace(registration(1), **changes)  # type: ignore[arg-type]
    refuse(world, registered, InvalidArgumentError, "INVALID_VALUE", field)


def test_no_memory_is_refused(world: Gathering) -> None:
    world.register(registration(0))
    refuse(world, registration(1, blocks=0), InvalidArgumentError, "NO_MEMORY", "available_bytes")


@pytest.mark.parametrize(
    ("registered", "reason", "field"),
    [
        (registration(1, 3), "RANKS_DISAGREE", "world_size"),
        (registration(1, options=replace(OPTIONS, max_model_len=2048)), "RANKS_DISAGREE", "options.max_model_len"),
        (
            registration(1, options=replace(OPTIONS, reuse_order=ReuseOrder.LRU)),
            "RANKS_DISAGREE",
            "options.reuse_order",
        ),
        (registration(1, layers=OTHER_LAYERS), "RANKS_DISAGREE_ON_A_LAYER", 'layers["layer.1"].num_kv_heads'),
        (registration(0, boot_id="another-one"), "RANK_TAKEN", "rank"),
    ],
)
def test_a_rank_that_differs_or_is_taken_is_refused(registered: Registration, reason: str, field: str) -> None:
    world = Gathering()
    world.register(registration(0))
    refuse(world, registered, WrongStateError, reason, f"register.{field}")


def test_rule_2_a_second_process_is_refused_while_the_first_is_alive_or_silent(world: Gathering) -> None:
    links = world.form()
    refuse(world, registration(1, boot_id="another-one"), WrongStateError, "RANK_TAKEN", "register.rank")
    lose(world, links[1], links[:1], "silence")
    refuse(world, registration(1, boot_id="another-one"), UnavailableError, "RANK_SILENT", "")


def test_a_process_that_registers_before_its_predecessor_is_missed_must_retry(world: Gathering) -> None:
    """A host that lost its connection restarts the rank; the old process counts as alive until its timeout."""
    links = world.form()
    world.wait(2 * TIMING.heartbeat_seconds + 0.01)
    refuse(world, registration(1, boot_id="another-one"), UnavailableError, "RANK_SILENT", "")
    world.beat(links[1])
    refuse(world, registration(1, boot_id="another-one"), WrongStateError, "RANK_TAKEN", "register.rank")


def test_a_rank_may_change_its_own_layers_but_not_those_of_others(world: Gathering) -> None:
    world.register(registration(0))
    world.register(registration(0, layers=OTHER_LAYERS))
    field = 'register.layers["layer.1"].num_kv_heads'
    refuse(world, registration(1), WrongStateError, "RANKS_DISAGREE_ON_A_LAYER", field)


@pytest.mark.parametrize(
    ("allocated", "field"),
    [(Allocated(1, 1, 1), "initialized.num_blocks"), (Allocated(9, 100, 1), "initialized.epoch")],
)
def test_a_report_out_of_range_is_refused(allocated: Allocated, field: str, world: Gathering) -> None:
    links = world.register_all()
    with world.refuses(field=field):
        world.members.initialized(links[0], allocated)


def test_rank_infos_describe_the_ranks(world: Gathering) -> None:
    links = world.register_all()
    world.allocate(links[0], 90)
    first, second = world.members.registry.rank_infos()
    assert (first.state, first.num_blocks, first.allocated_bytes) == (RankState.READY, 90, 90 * BLOCK_BYTES)
    assert (second.state, second.num_blocks) == (RankState.ALLOCATING, 0)
    assert repr(world.members) == "<Membership 'm': 2 of 2 ranks, forming, epoch 1>"


def test_a_heartbeat_names_the_processes_that_map_the_memory_and_a_bad_one_changes_nothing(world: Gathering) -> None:
    link = world.form()[0]
    world.do(world.members.heartbeat(link, 1, world.now_seconds, [MappingProcess(7, "vllm")]))
    before = world.members.registry.rank_infos()
    assert before[0].mapping_processes == (MappingProcess(7, "vllm"),)
    for processes, field in (
        ([MappingProcess(7, "é" * 129)], "heartbeat.mapping_processes[0].client_name"),
        ([MappingProcess(i, "") for i in range(MAX_MAPPING_PROCESSES + 1)], "heartbeat.mapping_processes"),
    ):
        with refused(field=field):
            world.members.heartbeat(link, 2, world.now_seconds, processes)
    assert world.members.registry.rank_infos() == before
