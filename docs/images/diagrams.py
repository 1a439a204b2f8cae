"""Draws the diagrams of the documentation; `make diagrams` writes them, and a test compares them with this source.

A diagram is a list of boxes, arrows and bars. Coordinates are pixels, with the origin at the top left.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

LINE_HEIGHT: Final = 17
FILLS: Final = {"client": "#e3f2fd", "server": "#ede7f6", "core": "#d1c4e9", "rank": "#e8f5e9", "other": "#f5f5f5"}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and lines of text below it."""

    x: int
    y: int
    width: int
    height: int
    fill: str
    title: str
    lines: tuple[str, ...] = ()

    def svg(self) -> str:
        """The box as SVG."""
        middle = self.x + self.width // 2
        text_y = self.y + 21
        position = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"'
        parts = [
            f'<rect {position} rx="6" fill="{FILLS[self.fill]}" stroke="#5f6368"/>',
            f'<text x="{middle}" y="{text_y}" class="title">{escape(self.title)}</text>',
        ]
        parts += [
            f'<text x="{middle}" y="{text_y + LINE_HEIGHT * number}">{escape(line)}</text>'
            for number, line in enumerate(self.lines, 1)
        ]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow along points, with a label beside its middle; `both` gives it two heads, `shift` moves the label."""

    points: tuple[tuple[int, int], ...]
    label: str = ""
    both: bool = False
    shift: tuple[int, int] = (8, 4)

    def svg(self) -> str:
        """The arrow as SVG."""
        heads = ' marker-start="url(#head)"' if self.both else ""
        corners = " ".join(f"{x},{y}" for x, y in self.points)
        line = f'<polyline points="{corners}" fill="none" stroke="#5f6368" marker-end="url(#head)"{heads}/>'
        if not self.label:
            return line
        (x1, y1), (x2, y2) = self.points[0], self.points[-1]
        x, y = (x1 + x2) // 2 + self.shift[0], (y1 + y2) // 2 + self.shift[1]
        return f'{line}\n<text x="{x}" y="{y}" class="label">{escape(self.label)}</text>'


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar between its label, 150 pixels wide, and its value; empty if its length is 0."""

    x: int
    y: int
    length: int
    fill: str
    label: str
    value: str = ""

    def svg(self) -> str:
        """The bar as SVG."""
        start = self.x + 150
        position = f'x="{start}" y="{self.y}" width="{self.length}" height="20"'
        parts = [
            f'<text x="{self.x}" y="{self.y + 14}" class="label">{escape(self.label)}</text>',
            f'<rect {position} fill="{FILLS[self.fill]}" stroke="#5f6368"/>',
            f'<text x="{start + self.length + 6}" y="{self.y + 14}" class="label">{escape(self.value)}</text>',
        ]
        return "\n".join(parts)


def diagram(width: int, height: int, description: str, parts: list[Box | Arrow | Bar]) -> str:
    """A whole SVG file."""
    body = "\n".join(part.svg() for part in parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
    width="{width}" height="{height}">
<title>{escape(description)}</title>
<style>
text {{ font: 12px sans-serif; fill: #202124; text-anchor: middle; }}
.title {{ font-weight: bold; font-size: 13px; }}
.label {{ font-style: italic; text-anchor: start; }}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"
    orient="auto-start-reverse">
<path d="M0 0 L8 4 L0 8 z" fill="#5f6368"/></marker></defs>
<rect width="{width}" height="{height}" fill="#ffffff"/>
{body}
</svg>
"""


def before_and_after() -> str:
    """Two engines on one machine, each with a cache of its own, and on shared memory."""
    left, right = 20, 430
    return diagram(
        820,
        330,
        "Before: each engine owns a KV cache. After: engines map one KV cache, which a worker owns.",
        [
            Box(left, 20, 370, 290, "other", "before: a cache in each engine"),
            Box(left + 20, 60, 155, 60, "client", "vLLM engine A", ("scheduler, block pool",)),
            Box(left + 195, 60, 155, 60, "client", "vLLM engine B", ("scheduler, block pool",)),
            Box(left + 20, 150, 155, 60, "rank", "KV cache of A", ("half the memory",)),
            Box(left + 195, 150, 155, 60, "rank", "KV cache of B", ("half the memory",)),
            Arrow(((left + 97, 120), (left + 97, 150))),
            Arrow(((left + 272, 120), (left + 272, 150))),
            Box(left + 20, 235, 330, 60, "other", "A restarts: its cache is lost", (
                "B computes what A has computed",
            )),
            Box(right, 20, 370, 290, "other", "after: one cache beside the engines"),
            Box(right + 20, 60, 155, 42, "client", "vLLM engine A", ("scheduler",)),
            Box(right + 195, 60, 155, 42, "client", "vLLM engine B", ("scheduler",)),
            Box(right + 20, 130, 155, 80, "server", "kvpool server", (
                "block pool, prefix cache,",
                "leases, metrics, events",
            )),
            Box(right + 195, 130, 155, 80, "rank", "kvpool worker", ("owns the KV cache:", "all the memory")),
            Arrow(((right + 60, 102), (right + 60, 130)), both=True),
            Arrow(((right + 225, 102), (right + 135, 130)), both=True),
            Arrow(((right + 145, 102), (right + 235, 130))),
            Arrow(((right + 300, 102), (right + 300, 130))),
            Box(right + 20, 235, 330, 60, "other", "A restarts: its cache is warm", (
                "B hits what A has computed",
            )),
        ],
    )  # fmt: skip


def architecture() -> str:
    """Schedulers, the server, ranks, routers and Prometheus."""
    return diagram(
        820,
        360,
        "Schedulers ask the kvpool server for blocks; ranks hold the memory; routers and Prometheus watch.",
        [
            Box(20, 20, 230, 62, "client", "scheduler A", (
                "vLLM with kvpool.client.vllm,",
                "or any user of kvpool.client",
            )),
            Box(20, 100, 230, 45, "client", "scheduler B", ("another process, the same pool",)),
            Box(20, 163, 230, 45, "other", "router", ("block events: Watch",)),
            Box(20, 226, 230, 45, "other", "Prometheus, kvpool top", ("metrics, lists, drain, reset",)),
            Box(400, 20, 400, 250, "server", "kvpool server: one process, one event loop", (
                "decode, authenticate, wait for a fair turn",
            )),
            Box(420, 75, 360, 115, "core", "core: no I/O, no clock", (
                "sessions: leases, requests, block tables",
                "blocks: free list, prefix map, reference counts",
                "groups: full, sliding window, MLA, Mamba, ...",
                "ranks: membership, epochs, fences",
            )),
            Box(420, 205, 360, 45, "other", "journal (optional)", ("commands and snapshots, in files",)),
            Arrow(((250, 51), (400, 51)), "AllocatorService, links", both=True, shift=(-68, -6)),
            Arrow(((250, 122), (400, 122)), "AllocatorService, links", both=True, shift=(-68, -6)),
            Arrow(((400, 185), (250, 185)), "EventService", shift=(-40, -6)),
            Arrow(((400, 248), (250, 248)), "AdminService, HTTP", shift=(-56, -6)),
            Box(400, 310, 190, 45, "rank", "rank 0 (GPU worker)", ("memory of its layers or heads",)),
            Box(610, 310, 190, 45, "rank", "rank 1 (GPU worker)", ("the same block ids",)),
            Arrow(((495, 270), (495, 310)), "WorkerService", both=True),
            Arrow(((705, 270), (705, 310)), "WorkerService", both=True),
            Arrow(
                ((20, 51), (8, 51), (8, 333), (400, 333)),
                "steps and block tables, sent by the engine itself",
                shift=(-165, 135),
            ),
        ],
    )  # fmt: skip


def life_of_a_request() -> str:
    """The way of one allocation through the code."""
    left, right = 20, 440
    return diagram(
        840,
        470,
        "The way of one allocation from the client session to the core and back.",
        [
            Box(left, 20, 360, 62, "client", "1  Session.step() / allocate_slots()", (
                "client/session.py, step_builder.py",
                "each call writes an entry into the columns of a Step",
            )),
            Box(left, 110, 360, 62, "client", "2  SessionProtocol.answer_on_credit() / encode()", (
                "client/protocol.py: decodes with credit stop here;",
                "the others get the next sequence number",
            )),
            Box(left, 200, 360, 62, "client", "3  StepStream.exchange()", (
                "wire/steps.py: columns to a protobuf Step",
                "client/transports/step_stream.py: a frame on the link",
            )),
            Box(right, 200, 380, 62, "server", "4  AllocatorService._serve_steps()", (
                "read a frame, wait for a fair turn, check limits",
                "server/services/step_links.py, allocator_service.py",
            )),
            Box(right, 290, 380, 62, "core", "5  apply_step(): validate, then apply", (
                "core/execution/rows.py: the whole step, no change",
                "core/execution/apply.py, allocate_batch.py",
            )),
            Box(right, 380, 380, 78, "core", "6  KVCacheManager.allocate_slots()", (
                "prefix_search: hit; group_manager: free behind windows",
                "slot_allocator, block_pool: take, evict, cache",
                "credit_tokens: tokens that need no further message",
            )),
            Box(right, 110, 380, 62, "server", "7  journal, events, StepResult", (
                "record the command, publish block events, encode",
                "server/journal, server/events, wire/steps.py",
            )),
            Box(left, 290, 360, 62, "client", "8  SessionProtocol.apply_result()", (
                "client/protocol.py: check the shape of the result",
                "client/result_reader.py: new block ids into the tables",
            )),
            Box(left, 380, 360, 78, "rank", "9  the engine runs the step", (
                "Worker.step(lease) checks epoch and session;",
                "then mark_executed(): other sessions may hit",
                "the blocks that the step filled",
            )),
            Arrow(((200, 82), (200, 110))),
            Arrow(((200, 172), (200, 200))),
            Arrow(((380, 220), (440, 220))),
            Arrow(((630, 262), (630, 290))),
            Arrow(((630, 352), (630, 380))),
            Arrow(((440, 415), (425, 415), (425, 150), (440, 150))),
            Arrow(((440, 130), (400, 130), (400, 320), (380, 320))),
            Arrow(((200, 352), (200, 380))),
        ],
    )  # fmt: skip


def vllm_on_a_gpu(figures: Mapping[str, Any], ran: str) -> str:
    """Figures of the stage `vllm-figures` of tests/gpu: decode on kvpool, and the first token after a restart.

    Args:
        figures: What the stage printed.
        ran: Where.
    """
    alone, kvpool, ratio = (figures[side] for side in ("alone", "kvpool", "ratio"))
    decode = {name.rpartition("_")[2]: ratio[name] for name in ratio if name.startswith("decode_tokens_per_s_at_")}
    first = {
        "vLLM alone": ("rank", alone["restart_known_prompt_ms"]),
        "kvpool, a new prompt": ("core", kvpool["restart_new_prompt_ms"]),
        "kvpool, cached before": ("core", kvpool["restart_known_prompt_ms"]),
    }
    longest = max(decode.values()), max(milliseconds for _, milliseconds in first.values())
    height = 90 + 28 * len(decode)
    return diagram(
        820,
        height + 20,
        "vLLM on kvpool beside vLLM alone, on a GPU.",
        [
            Box(20, 20, 380, height - 40, "other", "decode: tokens/s relative to vLLM alone"),
            *(
                Bar(35, 60 + 28 * row, round(150 * value / longest[0]), "core", f"{running} running", f"{value:.0%}")
                for row, (running, value) in enumerate(decode.items())
            ),
            Box(420, 20, 380, height - 40, "other", "first token after a restart of the engine"),
            *(
                Bar(435, 60 + 28 * row, round(150 * value / longest[1]), fill, label, f"{value:g} ms")
                for row, (label, (fill, value)) in enumerate(first.items())
            ),
            Bar(20, height - 10, 0, "other", ran),
        ],
    )


DIAGRAMS: Final = {
    "architecture.svg": architecture,
    "before-and-after.svg": before_and_after,
    "life-of-a-request.svg": life_of_a_request,
}


def main() -> None:
    """Writes all diagrams beside this file."""
    for name, draw in DIAGRAMS.items():
        (Path(__file__).parent / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
