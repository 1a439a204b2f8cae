"""Golden files with the answers of vLLM's KV cache manager, and a driver that compares them with those of a system."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from kvpool.client.hashing import ExtraKeys, MultiModalItem
from kvpool.core.ids import BlockHash, GroupId, PoolName
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import SPEC_KINDS
from kvpool.core.specs.pool_config import (
    HashScheme,
    KeyForm,
    KVCacheGroup,
    PoolConfig,
    ReuseOrder,
)

Line = dict[str, Any]


@dataclass(frozen=True)
class Schedule:
    """One golden file."""

    path: Path
    config: Line

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name.removesuffix('.jsonl.gz')}"

    @property
    def has_gaps(self) -> bool:
        """Whether blocks between cached ones are not cached."""
        modes = [group["spec"].get("mamba_cache_mode") for group in self.config["groups"]]
        return self.config.get("retention_tokens") is not None or "align" in modes

    def lines(self) -> Iterator[Line]:
        with gzip.open(self.path, "rt") as file:
            next(file)
            yield from map(json.loads, file)

    def pool_config(self, prefix: str = "golden") -> PoolConfig:
        config = self.config
        tagged = "0.14.1" not in config["recorded_from"]
        return PoolConfig(
            name=PoolName(f"{prefix}/{self.name}"),
            num_blocks=config["num_blocks"],
            max_model_len=config["max_model_len"],
            groups=tuple(
                KVCacheGroup(spec(group["spec"]), tuple(group["layer_names"]), not group.get("is_eagle_group", True))
                for group in config["groups"]
            ),
            reuse_order=ReuseOrder(config["reuse_order"]),
            enable_caching=config["enable_caching"],
            use_eagle=config["use_eagle"],
            dcp_world_size=config["dcp_world_size"],
            enable_events=True,
            retention_tokens=config.get("retention_tokens"),
            prefix_match_unit=config["hash_block_size"] if config.get("partial_hits") else 0,
            partial_hits=config.get("partial_hits", False),
            keeps_block_before_boundary=config.get("keeps_block_before_boundary", False),
            num_reprefillable_tokens=config.get("num_reprefillable_tokens", 0),
            allow_too_few_blocks=True,
            hash_scheme=HashScheme(
                algorithm=config["hash_algorithm"],
                none_hash=bytes.fromhex(config["none_hash"]),
                key_form=KeyForm.TAGGED if tagged else KeyForm.PLAIN,
                num_lookahead_tokens=config.get("num_hash_lookahead_tokens", 0),
            ),
        )


def read_schedules(folder: Path) -> list[Schedule]:
    schedules = []
    for path in sorted(folder.rglob("*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            schedules.append(Schedule(path, json.loads(next(file))["config"]))
    return schedules


def spec(golden: Line) -> KVCacheSpec:
    """Reads a spec, without the fields of the reference that our specs do not have."""
    kind = SPEC_KINDS[golden["type"]]
    golden = golden | {"only_step_ends": golden.get("mamba_cache_mode") == "align"}
    names = [f.name for f in fields(kind)]
    return kind(**{name: frozen(golden[name]) for name in names if golden.get(name) is not None})


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def _by_block(events: list[Line]) -> list[Line]:
    """Splits events by block. The reference reports blocks with gaps in one event, with the tokens of all.

    The reference also stores the hash of a whole block for a state within it, and removes it in the same call. These
    pairs are left out.
    """
    names = ("type", "block_size", "group_idx")
    found: list[Line] = []
    for event in events:
        for block_hash in event.get("block_hashes", (None,)):
            line = {name: event.get(name) for name in names} | {"block_hash": block_hash}
            stored = {**line, "type": "BlockStored"}
            same = [each for each in found if {**each, "block_size": None} == stored]
            if event["type"] == "BlockRemoved" and same:
                found.remove(same[0])
            else:
                found.append(line)
    return found


def extra_keys(line: Line) -> ExtraKeys:
    items = [MultiModalItem(m["identifier"], m["offset"], m["length"]) for m in line.get("mm_features", ())]
    return ExtraKeys(line.get("lora_name"), line.get("lora_path", ""), line.get("cache_salt"), items)


@dataclass
class Stats:
    """Counters of look-ups since the start, and resets."""

    requests: int
    queries: int
    hits: int
    preempted_requests: int
    preempted_queries: int
    preempted_hits: int
    resets: int


class System(Protocol):
    """A system under test."""

    def request(self, request_id: str, token_ids: list[int], keys: ExtraKeys) -> Sequence[BlockHash]:
        """Declares a request; returns its hashes."""

    def append(self, request_id: str, token_ids: list[int]) -> Sequence[BlockHash]:
        """Adds tokens; returns the new hashes."""

    def get_computed_blocks(self, request_id: str, *, counted: bool) -> tuple[list[list[int]], int]: ...

    def allocate_slots(self, line: Line) -> list[list[int]] | None: ...

    def table(self, request_id: str) -> list[list[int]]: ...

    def copies(self) -> list[list[int]]:
        """Source and target of each copy of the last allocation, group by group."""

    def cache_blocks(self, request_id: str, num_computed_tokens: int) -> None: ...

    def free(self, request_id: str) -> None: ...

    def preempt(self, request_id: str) -> None: ...

    def common_prefix_blocks(self, request_id: str) -> list[int]: ...

    def evict(self, block_ids: list[int]) -> None: ...

    def reset(self) -> bool: ...

    def stats(self) -> Stats: ...

    def free_blocks(self) -> int: ...

    def usage(self) -> float: ...

    def events(self, count: int) -> list[Line]:
        """The events since the last call, of which `count` are expected, in the form of the golden files."""


class _WholeBlocks:
    """Converts events, which are of hash blocks, to those of whole blocks, as the reference reports them.

    The reference thereby names parents that no event has announced: those within the blocks of another group.
    """

    def __init__(self, schedule: Schedule) -> None:
        config = schedule.pool_config()
        self._unit = config.hash_block_size
        self._per_block = [config.span_tokens(GroupId(i)) // self._unit for i in range(len(config.groups))]
        self._are_states = [getattr(group.spec, "only_step_ends", False) for group in config.groups]
        self._ends: dict[int, int] = {}  # by hash, the number of hash blocks of the prefix
        self._removed = (-1, -1)  # group and end of the removal before

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """Learns all hashes of a request."""
        self._ends.update((int.from_bytes(each[-8:], "big"), i) for i, each in enumerate(hashes, 1))

    def convert(self, event: Line) -> Line | None:
        """Returns the reference's event; None for a removal that it does not report."""
        if "block_hashes" not in event or (per_block := self._per_block[event["group_idx"]]) == 1:
            return event
        hashes, group = event["block_hashes"], event["group_idx"]
        if event["type"] == "BlockRemoved":
            end, before = self._ends[hashes[0]], self._removed
            self._removed = group, end
            return None if end % per_block and before == (group, end + 1) and not self._are_states[group] else event
        ends = [i for i, each in enumerate(hashes) if self._ends[each] % per_block == 0]
        whole: Line = {"block_size": per_block * self._unit}
        if not ends:  # a prefix that ends within a block
            ends, whole = [len(hashes) - 1], {"token_ids": event["token_ids"][-self._unit :]}
            whole["parent_block_hash"] = hashes[-2] if len(hashes) > 1 else event["parent_block_hash"]
        ahead = event["lookahead_token_ids"]
        whole |= {"block_hashes": [hashes[i] for i in ends], "lookahead_token_ids": ahead and [ahead[i] for i in ends]}
        return event | whole


class Driver:
    """Drives a system through a schedule and compares every answer."""

    def __init__(self, system: System, schedule: Schedule) -> None:
        self._system = system
        self._schedule = schedule
        # vLLM 0.14.1 counts a look-up at once and names no group in its events. Later the scheduler counts look-ups
        # with a separate call, which was not made when the files were recorded; there every count is 0.
        version = schedule.config["recorded_from"]
        self._counted = "0.14.1" in version
        self._unknown = {"group_idx": self._counted, "lookahead_token_ids": "0.33" not in version}
        self._taken = Stats(0, 0, 0, 0, 0, 0, 0)
        self._hashes: dict[str, list[BlockHash]] = {}
        self._whole_blocks = _WholeBlocks(schedule)

    def run(self) -> None:
        for number, line in enumerate(self._schedule.lines(), start=2):
            where = f"{self._schedule.name} line {number}: {line['op']} {line.get('request_id', '')}"
            answer = self._answer(line)
            assert answer == line["out"], f"{where}: {answer}, not {line['out']}"
            assert self._system.free_blocks() == line["free_blocks"], where
            assert abs(self._system.usage() - line["usage"]) < 1e-12, where
            found = map(self._whole_blocks.convert, self._system.events(len(line["events"])))
            events = [event for event in found if event]
            events = [{k: v for k, v in event.items() if not self._unknown.get(k)} for event in events]
            wanted = line["events"]
            if self._schedule.has_gaps:
                events, wanted = _by_block(events), _by_block(wanted)
            assert events == wanted, f"{where}: {events}, not {wanted}"

    def _add_hashes(self, request_id: str, new: Sequence[BlockHash]) -> Line:
        self._hashes[request_id] += new
        self._whole_blocks.add(self._hashes[request_id])
        return {"block_hashes": [each.hex() for each in new]}

    def _answer(self, line: Line) -> Line:  # noqa: C901, PLR0911 - one branch an op
        system, op, request_id = self._system, line["op"], line.get("request_id", "")
        if op == "request":
            self._hashes[request_id] = []
            return self._add_hashes(request_id, system.request(request_id, line["token_ids"], extra_keys(line)))
        if op == "append_tokens":
            return self._add_hashes(request_id, system.append(request_id, line["token_ids"]))
        if op == "get_computed_blocks":
            block_ids, num_tokens = system.get_computed_blocks(request_id, counted=self._counted)
            return {"block_ids": block_ids, "num_computed_tokens": num_tokens}
        if op == "allocate_slots":
            new = system.allocate_slots(line)
            out = {"block_ids": new} | ({} if new is None else {"all_block_ids": system.table(request_id)})
            return out | ({"copies": system.copies()} if "copies" in line["out"] else {})
        if op == "get_num_common_prefix_blocks":
            return {"num_blocks": system.common_prefix_blocks(request_id)}
        if op == "reset_prefix_cache":
            return {"ok": system.reset()}
        if op == "take_prefix_cache_stats":
            return self._take_stats()
        if op == "cache_blocks":
            system.cache_blocks(request_id, line["num_computed_tokens"])
        elif op == "evict_blocks":
            # The reference takes a set. We evict in the given order, so pass the order of the set.
            system.evict(list(set(line["block_ids"])))
        elif op == "free" and line["preempted"]:
            system.preempt(request_id)
        elif op == "free":
            system.free(request_id)
        else:
            raise ValueError(op)
        return {}

    def _take_stats(self) -> Line:
        now, before = self._system.stats(), self._taken
        self._taken = now
        since = {key: getattr(now, key) - getattr(before, key) for key in vars(now)}
        return {"reset": since.pop("resets") > 0, **since}
