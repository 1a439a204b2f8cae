"""Makes docs/images/top.svg: `kvpool top` over a real server, three schedulers that chat, and a pool that lost a rank.

    PYTHONPATH=tests python docs/images/draw_top.py [FILE]

What it shows is what the command would: the same samples, the same lines.
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
from kvpool.replay import play
from kvpool.replay.play import PoolOptions
from kvpool.replay.scheduler import SchedulerOptions
from kvpool.replay.workload import ChatShare, Workload
from support.ranks import registration
from support.server import ServerProcess
from support.wire_ranks import WireRank, wait_until

ADDRESS = "unix:/tmp/kvpool.sock"
POOL = PoolOptions("llama-3.1-8b", 4000, 16, 8192, ReuseOrder.UNCACHED_FIRST)
RANKED = "gemma-3-27b"
COLUMNS, LINES = 80, 16
LOOKUPS = 400
"""Before the picture is taken: by then conversations come back."""


def main() -> None:
    """Makes the picture."""
    path = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parents[2] / "docs" / "images" / "top.svg")
    server = ServerProcess(ADDRESS)
    try:
        lose_a_rank()
        before, now = sampled_at_work()
    finally:
        server.stop()
    screen = top_view.Screen(COLUMNS, LINES)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in top_view.lines(screen, ADDRESS, now, top_sample.between(before, now)):
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    picture = console.export_svg(title="kvpool top", theme=MONOKAI, unique_id="kvpool-top")
    without_fonts = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # nothing is fetched to show it
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line.rstrip() for line in without_fonts.splitlines()) + "\n", encoding="utf-8")


def lose_a_rank() -> None:
    """Forms a pool of two ranks, and cuts one off."""
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
        wait_until(lambda: client.get_pool(RANKED).state is PoolState.DEGRADED, "a rank is missed")


def sampled_at_work() -> tuple[Sample, Sample]:
    """Takes two samples, a second apart, while three schedulers chat."""
    shares: list[Workload] = [ChatShare(2026, index, 150, 5) for index in range(3)]
    how = SchedulerOptions(ADDRESS, POOL.name, 0.0, max_num_seqs=48, max_num_batched_tokens=2048)
    console = play.Console(lambda _: None, print)
    chat = threading.Thread(target=play.replay_shares, args=(ADDRESS, POOL, shares, how, console))
    chat.start()
    with AdminClient(ADDRESS) as admin:
        wait_until(lambda: lookups(admin) >= LOOKUPS, "prompts are looked up", seconds=60)
        before = top_sample.take(admin)
        time.sleep(1)
        now = top_sample.take(admin)
    chat.join()
    return before, now


def lookups(admin: AdminClient) -> int:
    """Prompts that were looked up so far."""
    return sum(info.prefix_cache.requests for info in admin.overview().pools)


if __name__ == "__main__":
    main()
