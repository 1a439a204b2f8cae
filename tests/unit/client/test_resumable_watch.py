"""Rule 4 of resumable_watch: a pool that no longer exists."""

from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.transport import WatchKind, WatchOptions
from kvpool.core.errors import NotFoundError, UnavailableError
from kvpool.core.events import AllBlocksCleared
from kvpool.v1 import event_pb2
from kvpool.wire.protocol_version import PROTOCOL_VERSION

START = event_pb2.WatchResponse(
    kind=event_pb2.WATCH_RESPONSE_KIND_START, boot_id="b", protocol_version=PROTOCOL_VERSION
)
END = event_pb2.WatchResponse(kind=event_pb2.WATCH_RESPONSE_KIND_SNAPSHOT_END, boot_id="b")


def test_a_lost_pool_is_reported_once_and_its_successor_from_the_start() -> None:
    watch, gone = ResumableWatch(WatchOptions("m", snapshot=True)), NotFoundError("pool", "m")
    assert watch.lost_pool(gone) is None
    for _ in range(2):
        batch = watch.read(START)
        assert batch
        assert batch.kind is WatchKind.START
        watch.read(END)
        assert watch.lost_pool(UnavailableError("DOWN", "")) is None
        assert not watch.request().snapshot
        lost = watch.lost_pool(gone)
        assert lost
        assert (lost.kind, lost.events) == (WatchKind.BATCH, (AllBlocksCleared(),))
        assert watch.lost_pool(gone) is None
        assert watch.request().snapshot
