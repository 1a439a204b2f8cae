"""The one task of a server that watches deadlines: of leases, quarantines and ranks."""

from kvpool.server.services.components import Components


async def watch_deadlines(parts: Components) -> None:
    """Ends leases, quarantines and grace times that are over, and detects silent ranks. Runs indefinitely."""
    while True:
        await parts.clock.sleep_until(min(parts.state.next_expiry_seconds(), parts.ranks.next_deadline_seconds()))
        parts.sessions.end_due()
        parts.ranks.tick()
