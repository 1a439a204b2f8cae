"""Draws docs/images/top.svg: `kvpool top` on a real server with three schedulers and a pool that has lost a rank.

    PYTHONPATH=tests python docs/images/draw_top.py [FILE]

Samples and lines are those of the command.
"""

import io
import re
import sys
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from kvpool.cli import top_sample, top_view
from kvpool.cli.top_sample import Sample
from kvpool.client import PoolState, ReuseOrder, connect
from kvpool.client.admin import AdminClient
from kvpool.replay.play import replay_pool
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import ChatShare
from support.ranks import registration
from support.server import ServerProcess
from support.waiting import wait_until
from support.wire_ranks import WireRank

ADDRESS = "unix:/tmp/kvpool.sock"
POOL = replay_pool("llama-3.1-8b", 4000, 16, 8192, ReuseOrder.UNCACHED_FIRST)
RANKED = "gemma-3-27b"
COLUMNS, LINES = 80, 16
LOOKUPS = 400
"""Look-ups before the picture is taken, so that conversations have later turns."""


def main() -> None:
    """Draws the picture."""
    path = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parents[2] / "docs" / "images" / "top.svg")
    server = ServerProcess(ADDRESS, past_epoch=59_712_344)
    try:
        lose_a_rank()
        before, now = sampled_at_work()
    finally:
        server.stop()
    screen = top_view.Screen(COLUMNS, LINES)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in top_view.lines(screen, ADDRESS, top_sample.since(before, now)):
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    picture = console.export_svg(title="kvpool top", theme=MONOKAI, unique_id="kvpool-top")
    without_fonts = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # the picture must not load fonts
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line.rstrip() for line in without_fonts.splitlines()) + "\n", encoding="utf-8")


def lose_a_rank() -> None:
    """Forms a pool of two ranks, and disconnects one."""
    ranks = [
        WireRank(ADDRESS).register(registration(rank, blocks=8000, boot_id=f"process-{rank}"), RANKED)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.allocate()
    for rank in ranks:
        rank.wait_for("ready")
    ranks[1].cut()
    with connect(ADDRESS) as client:
        wait_until(lambda: client.get_pool(RANKED).state == PoolState.POOL_STATE_DEGRADED, "the pool is degraded")


def sampled_at_work() -> tuple[Sample, Sample]:
    """Takes two samples, one second apart, while three schedulers play chats."""
    with connect(ADDRESS) as client:
        client.create_pool(POOL)
    players = [threading.Thread(target=chat, args=(index,)) for index in range(3)]
    for player in players:
        player.start()
    with AdminClient(ADDRESS) as admin:
        wait_until(lambda: lookups(admin) >= LOOKUPS, "prompts have been looked up", seconds=60)
        before = top_sample.take(admin)
        time.sleep(1)
        now = top_sample.take(admin)
    for player in players:
        player.join()
    return before, now


def chat(index: int) -> None:
    """Plays the chats of one scheduler."""
    with connect(ADDRESS) as client, client.open_session(POOL.name, client_name=f"kvpool-scheduler-{index}") as session:
        Scheduler(session, ChatShare(2026, index, 150, 5), max_num_seqs=48, max_num_batched_tokens=2048).run()


def lookups(admin: AdminClient) -> int:
    """Returns the number of look-ups."""
    return sum(info.prefix_cache.requests for info in admin.overview().pools)


if __name__ == "__main__":
    main()
