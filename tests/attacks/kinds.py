"""All attacks, by name."""

from typing import Final

from attacks import files, floods, lending, links, memory, shards, shares, steps
from attacks.attack import Attack
from attacks.lending import LendingTarget
from attacks.shards import ShardTarget

_NUM_FILES: Final = 256
_FEW_FILES: Final = ("prlimit", f"--nofile={_NUM_FILES}:{_NUM_FILES}")

ATTACKS: Final = {
    "connections": Attack(floods.flood_connections, limit=_FEW_FILES),
    "metrics": Attack(floods.flood_metrics, meanwhile=floods.scrape),
    "log": Attack(files.fill_log, has_full_log=True),
    "tokens": Attack(files.rewrite_tokens),
    "disk": Attack(files.fill_disk, is_on_small_disk=True, costs_journal=True, afterwards=files.start_on_full_disk),
    "journal": Attack(files.delete_journal, costs_journal=True),
    "memory": Attack(memory.exhaust_memory, costs_time=True),
    "refused": Attack(memory.send_refused_messages),
    "strings": Attack(memory.send_empty_strings),
    "watches": Attack(memory.watch_without_reading),
    "sessions": Attack(shares.open_sessions, meanwhile=shares.open_session),
    "in_flight": Attack(shares.free_behind_steps, meanwhile=shares.use_minimum),
    "reserves": Attack(shares.hold_reserves, meanwhile=shares.use_minimum),
    "scopes": Attack(shares.open_scopes),
    "strangers": Attack(floods.call_without_token, meanwhile=floods.connect),
    "held_chunks": Attack(steps.hold_chunks),
    "sampled_hashes": Attack(steps.sample_hashes),
    "fresh_states": Attack(steps.hit_states),
    "links": Attack(links.flood_links, limit=_FEW_FILES, meanwhile=links.step),
    "torn_links": Attack(links.send_no_rest, meanwhile=links.step),
    "unread_links": Attack(links.read_no_answers, meanwhile=links.step),
    "far_ahead": Attack(links.send_far_ahead, meanwhile=links.step),
    "lender": Attack(floods.flood_lender, LendingTarget, meanwhile=lending.map_memory),
    "engines": Attack(lending.name_sessions, LendingTarget, meanwhile=lending.map_memory),
    "replication": Attack(floods.flood_replication, ShardTarget, limit=_FEW_FILES, meanwhile=shards.restart_standby),
}
