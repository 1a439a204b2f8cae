"""The server as it is started, on the simulated network."""

from dataclasses import dataclass

from kvpool.server.config import ServerConfig
from kvpool.server.core.world import RankTiming
from kvpool.server.server import Server


@dataclass(slots=True)
class ServerSettings:
    """What a server process is started with."""

    address: str
    rank_timing: RankTiming


class ServerProcess:
    """One process of the server.

    Attributes:
        server: The server; what the checks look at.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.server: Server | None = None

    async def main(self) -> None:
        """Serves until it is killed."""
        config = ServerConfig(addresses=(self._settings.address,), rank_timing=self._settings.rank_timing)
        self.server = Server(config)
        await self.server.start()
