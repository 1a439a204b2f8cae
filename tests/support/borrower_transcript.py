"""Transcripts of the processes that map a rank's memory: what the registry does upon each event, and its state.

Processes have names of one letter. Those that map the memory show the sessions that they have named.

| command | event |
|---|---|
| `begin 5`, `end` | epoch 5 begins and is open; it ends |
| `narrow 2 [1 2]` | sessions up to 2 have ended, except those that are live |
| `kill 1 [epoch=4]` | session 1 has ended by force |
| `connect p`, `disconnect p` | p has a connection, at first or another one; a connection ends |
| `map p [5]`, `ask p`, `unmap p` | p maps the memory of epoch 5; asks for memory that it may map; unmaps it |
| `bind p 1 [epoch=4]` | p names a session |
| `answer p 1` | p answers its fence 1 |
| `exit p` | p has exited |
| `disk full`, `disk torn`, `disk works` | no list can be written; no session can be added to the list; both can |
| `restart p q` | a later process of the rank finds these processes in the list, and begins the epoch again |

A command with `early` concerns the connection of a process before its newest one.
"""

import errno
import os
from collections.abc import Iterable

from kvpool.core.ids import SessionNumber, TableLease
from kvpool.lending.borrower_registry import Borrower, BorrowerRegistry, FenceSent, Link
from kvpool.lending.memory_folder import PastBorrower
from support.transcripts import Played


class BorrowerTranscript(Played):
    """A registry in epoch 5, and its processes. Nothing happens without a command."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = self._new_registry()
        self.processes: dict[str, Borrower] = {}
        self._links: dict[str, list[Link]] = {}
        self._saved: list[PastBorrower] = []
        self._disk = "works"
        self._do_begin("5")

    def _new_registry(self) -> BorrowerRegistry:
        made = BorrowerRegistry(self._save, self._add, lambda borrower: self.lines.append(f"kills {borrower.name}"))
        return made.attach(lambda: self.lines.append("reports that fewer may be pending"))

    def _link(self, name: str, when: str = "") -> Link:
        return self._links[name][-2 if when == "early" else -1]

    def _do_begin(self, epoch: str) -> None:
        self.registry.begin(int(epoch))
        self.registry.open(int(epoch))

    def _do_end(self) -> None:
        self.registry.end()

    def _do_narrow(self, last: str, *live: str) -> None:
        self.registry.narrow(int(last), tuple(map(int, live)))

    def _do_kill(self, session: str, epoch: str = "5") -> None:
        self.registry.kill([_lease(session, epoch)])

    def _do_connect(self, name: str) -> None:
        link = Link(lambda fence: self.lines.append(f"sends {name} {_fence(fence)}"))
        self._links.setdefault(name, []).append(link)
        self.processes[name] = self.registry.connect(ord(name), 100, "id", name, link)

    def _do_disconnect(self, name: str, when: str = "") -> None:
        forgotten = self.registry.disconnect(self.processes[name], self._link(name, when))
        self.lines += [f"forgets {borrower.name}" for borrower in forgotten]

    def _do_map(self, name: str, epoch: str = "5", when: str = "") -> None:
        link = self._link(name, when)
        self.registry.map(self.processes[name], link, int(epoch), lambda: self.lines.append(f"sends {name} the memory"))

    def _do_ask(self, name: str) -> None:
        self.registry.resend_fence(self.processes[name], self._link(name))

    def _do_unmap(self, name: str, when: str = "") -> None:
        self.registry.unmap(self.processes[name], self._link(name, when))

    def _do_bind(self, name: str, session: str, when: str = "", epoch: str = "5") -> None:
        self.registry.bind(self.processes[name], self._link(name, when), _lease(session, epoch))

    def _do_answer(self, name: str, sequence: str, when: str = "") -> None:
        self.registry.fence_answered(self.processes[name], self._link(name, when), int(sequence))

    def _do_exit(self, name: str) -> None:
        gone = self.registry.remove_exited(self.processes[name])
        self.lines.append(f"{name} is gone, with sessions {_numbers(lease.session_number for lease in gone)}")

    def _do_disk(self, state: str) -> None:
        self._disk = state

    def _do_restart(self, *names: str) -> None:
        self.registry = self._new_registry()
        self.registry.begin(5)
        saved = {past.name: past for past in self._saved}
        self.processes = {name: self.registry.restore(saved[name], 5) for name in names}

    def _save(self, borrowers: list[PastBorrower]) -> None:
        if self._disk == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._saved = borrowers
        self.lines.append(f"writes: {'; '.join(map(_past, borrowers)) or 'none'}")

    def _add(self, borrower: PastBorrower) -> None:
        if self._disk != "works":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.lines.append(f"adds: {_past(borrower)}")

    def _state(self) -> str:
        registry = self.registry
        facts = [f"pending {_numbers(registry.pending)}"] if not registry.is_drained else []
        facts += [] if registry.is_in_use else ["not in use"]
        for each in registry.all():
            how = ["maps"] * each.maps + ["connected"] * bool(each.link)
            sessions = _numbers(lease.session_number for lease in each.leases)
            facts.append(f"{each.name} {' '.join(how) or 'disconnected'} {sessions}")
        return "; ".join(facts)


def _lease(session: str, epoch: str) -> TableLease:
    return TableLease(int(epoch), SessionNumber(int(session)))


def _fence(fence: FenceSent) -> str:
    live = _numbers(fence.live_session_numbers)
    return f"fence {fence.fence_sequence} of epoch {fence.epoch}: up to {fence.last_session_number} except {live}"


def _past(borrower: PastBorrower) -> str:
    return f"{borrower.name} {_numbers(number for _, number in borrower.sessions)}"


def _numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, sorted(numbers))) or "-"
