"""The real server on the simulated network; its journal, if enabled, is in real files."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpool.core.ranks.messages import RankTiming
from kvpool.core.state import State
from kvpool.server.app import Server
from kvpool.server.auth.config import AuthConfig
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.facts import Role
from kvpool.server.config import ServerConfig
from kvpool.server.journal import folder as folder_module
from kvpool.server.journal.config import JournalConfig
from kvpool.server.journal.folder import write_whole
from simulation.virtual_loop import Killed
from support.journal import kill

_PLAINTEXT = AuthConfig(allow_plaintext=frozenset(("grpc", "replication")))


@dataclass(slots=True)
class ServerSettings:
    """Settings of a server process.

    Attributes:
        address: Listening address.
        rank_timing: Time limits for ranks.
        folder: Folder of the journal; None for no journal.
        cluster: Its shard.
        became_primary: Called when a server of a shard has become the primary, with whether the state is lost.
    """

    address: str
    rank_timing: RankTiming
    folder: Path | None
    cluster: ClusterConfig
    became_primary: Callable[["ServerProcess", bool], None]


class ServerProcess:
    """One process of a server.

    Attributes:
        server: The server, for the checks.
        term: Its term as the primary of its shard; 0 if it has not been the primary, or has no shard.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._are_files_closed = False
        self.server: Server | None = None
        self.term = 0

    @property
    def state(self) -> State | None:
        """The core, if it serves its pools."""
        server = self.server
        if server is None or (server.shard and server.shard.replica.role is not Role.PRIMARY):
            return None
        return server.components.state

    async def start(self) -> None:
        """Begins to serve."""
        folder = str(self._settings.folder or "")
        config = ServerConfig(
            addresses=(self._settings.address,),
            rank_timing=self._settings.rank_timing,
            journal=JournalConfig(folder),
            past_epoch=int(asyncio.get_running_loop().time() * 1000),  # like `kvpool serve`, which uses seconds
            auth=_PLAINTEXT,
            cluster=self._settings.cluster,
        )
        self.server = _ObservedServer(config, self._became_primary)
        await self.server.start()

    async def run_until_over(self) -> None:
        """Serves until it was terminated or deposed, unless it is killed first."""
        if self.server:
            await self.server.run_until_over()
        self._are_files_closed = True

    def terminate(self) -> None:
        """SIGTERM."""
        if self.server:
            self.server.components.shutdown.on_signal(0.0)

    @property
    def has_journal(self) -> bool:
        """Whether its journal is complete. That of a standby that has loaded a snapshot is not for a while."""
        journal = self.server._journal if self.server else None
        if journal is None:
            return False
        return journal.counts.is_up or not (journal._begun.is_set() or journal.recovery.dropped)

    @property
    def dropped(self) -> str:
        """Reason why the journal was dropped; empty if it was not."""
        journal = self.server._journal if self.server else None
        return journal.recovery.detail if journal and journal.recovery.dropped else ""

    def close_files(self) -> None:
        """Closes files as the kernel does for a killed process."""
        journal = self.server._journal if self.server else None
        if journal and not self._are_files_closed:
            self._are_files_closed = True
            kill(journal)

    def _became_primary(self, term: int, is_state_lost: bool) -> None:  # noqa: FBT001 - as the server reports it
        self.term = term
        self._settings.became_primary(self, is_state_lost)


class _ObservedServer(Server):
    """A server that reports when it has become the primary."""

    def __init__(self, config: ServerConfig, report: Callable[[int, bool], None]) -> None:
        super().__init__(config)
        self._report = report

    def become_primary(self, term: int, *, is_state_lost: bool) -> None:
        super().become_primary(term, is_state_lost=is_state_lost)
        self._report(term, is_state_lost)


def tear_next_write(share: float, kill: Callable[[], None]) -> None:
    """Kills a server in the middle of the next frame that it writes to its journal.

    Args:
        share: Share of the frame that is written, in [0, 1].
        kill: Kills the process that is running.
    """

    def tear(descriptor: int, content: bytes) -> None:
        write_well()
        os.write(descriptor, content[: round(share * len(content))])
        kill()
        raise Killed

    vars(folder_module)["write_whole"] = tear


def write_well() -> None:
    """Undoes `tear_next_write`."""
    vars(folder_module)["write_whole"] = write_whole
