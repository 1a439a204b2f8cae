"""A process of an engine that maps a rank's memory: started by `support.lending.EngineProcess`.

It reads commands from stdin, one JSON list per line, and answers each with one line of JSON. Each token fills its slot
with its own number, so that the contents of a block show whose tokens it holds.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvpool.client import KvpoolError, Session, connect
from kvpool.client.request import Request
from kvpool.lending.lender_client import LentMemory, connect_lender
from support.lending import BLOCK_SIZE, declared_with


class Engine:
    """The state of the process."""

    def __init__(self, session: Session, memories: list[LentMemory]) -> None:
        self._session = session
        self._memories = memories
        self._slots = [memory.buffer.view(torch.int32).view(memory.num_blocks, BLOCK_SIZE, -1) for memory in memories]
        self._requests: dict[str, Request] = {}

    def run(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """Admits a request, computes what is not cached on all ranks, and reports the step as executed."""
        request = self._requests[name] = self._session.request(name, tokens)
        admitted = self._session.admit(request)
        if not admitted:
            return {"blocks": None}
        hit = admitted.num_hit_tokens
        wrong = self._wrong(tokens[:hit], request)
        self._step(tokens, request, hit)
        self._session.mark_executed()
        return {"hit": hit, "wrong": wrong, "blocks": list(request.block_ids[0])}

    def check(self, name: str, tokens: list[int]) -> int:
        """Number of wrong slots of a request."""
        return self._wrong(tokens, self._requests[name])

    def step(self) -> str:
        """Tries a step; returns "ok", or why it must not run."""
        try:
            for memory in self._memories:
                memory.step(self._session.table_lease).done()
        except KvpoolError as error:
            return error.reason
        return "ok"

    def hang(self) -> str:
        """Starts a step that never ends."""
        for memory in self._memories:
            memory.step(self._session.table_lease)
        return "ok"

    def free(self, name: str) -> str:
        """Frees a request."""
        self._session.free(self._requests.pop(name))
        return "ok"

    def fill_host(self, row: int, value: int) -> str:
        """Fills a block in host memory of all ranks."""
        for memory in self._memories:
            if memory.host is not None:
                memory.host[row].fill_(value)
        return "ok"

    def host(self) -> list[list[int] | None]:
        """The first byte of each block in host memory, by rank; None for a rank without blocks there."""
        return [None if memory.host is None else memory.host[:, 0].tolist() for memory in self._memories]

    def unmap(self) -> str:
        """Unmaps the memory, as an engine that sleeps."""
        for memory in self._memories:
            memory.unmap()
        return "ok"

    def map_again(self) -> str:
        """Maps the memory again, as an engine that wakes up."""
        for memory in self._memories:
            memory.map_again()
        return "ok"

    def close(self) -> str:
        """Closes the session and gives the memory back; the process continues."""
        self._session.close()
        for memory in self._memories:
            memory.close()
        return "ok"

    def _step(self, tokens: list[int], request: Request, start: int) -> None:
        for memory, slots in zip(self._memories, self._slots, strict=True):
            with memory.step(self._session.table_lease):
                for i in range(start, len(tokens)):
                    slots[request.block_ids[0][i // BLOCK_SIZE], i % BLOCK_SIZE] = tokens[i]

    def _wrong(self, tokens: list[int], request: Request) -> int:
        return sum(
            not bool((slots[request.block_ids[0][i // BLOCK_SIZE], i % BLOCK_SIZE] == token).all())
            for slots in self._slots
            for i, token in enumerate(tokens)
        )


def main(settings: dict[str, Any]) -> None:
    """Maps the memory of all ranks, opens a session, and answers commands until stdin ends."""
    declared = declared_with(settings["num_blocks"])
    lenders = [connect_lender(address, "m", client_name="engine") for address in settings["lenders"]]
    with ThreadPoolExecutor() as threads:  # a map waits for the other ranks
        memories = list(threads.map(lambda lender: lender.map(declared, 60.0), lenders))
    with connect(settings["server"], deadline_seconds=60) as client:
        session = client.open_session("m", lease_seconds=settings["lease_seconds"])
        for memory in memories:
            memory.bind(session.table_lease)
        lease = session.table_lease
        offers = [[lender.offer.is_lent, lender.offer.available_bytes] for lender in lenders]
        answer({"session_number": lease.session_number, "epoch": lease.epoch, "offers": offers})
        engine = Engine(session, memories)
        for line in sys.stdin:
            do, *arguments = json.loads(line)
            try:
                answer(getattr(engine, do)(*arguments))
            except KvpoolError as error:
                answer({"error": type(error).__name__, "reason": error.reason})


def answer(value: object) -> None:
    """Writes one line."""
    print(json.dumps(value), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
