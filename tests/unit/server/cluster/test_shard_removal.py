"""Removal of a lost shard: what goes, and what is refused."""

from collections.abc import Callable, Iterator

import pytest

from kvpool.core.errors import InvalidArgumentError, KvpoolError, NotFoundError, UnavailableError, WrongStateError
from kvpool.core.ids import PoolName
from kvpool.server.cluster import shard_removal
from kvpool.server.cluster.directory import DamagedRecordError, ShardName, VersionedRecord
from kvpool.server.cluster.directory_cache import DirectoryCache
from kvpool.server.cluster.shard_removal import remove_shard
from support.listeners import listening, record_at, refusing
from support.memory_directory import Fate, MemoryDirectory, Store

OWN, LOST, LIVING = ShardName("own"), ShardName("lost"), ShardName("living")
P, Q, R = PoolName("p"), PoolName("q"), PoolName("r")


class Cluster:
    """A directory with the shard of the server, one that is lost, and one whose standby can be reached."""

    def __init__(self, lost_address: str, address: str) -> None:
        self.store = Store()
        self.store.put(OWN, record_at(address))
        self.store.put(LOST, record_at(lost_address))
        self.store.put(LIVING, record_at(lost_address, address))
        self.store.pools |= {P: LOST, Q: LIVING, R: LOST}
        self.directory = MemoryDirectory(self.store)
        self.view = DirectoryCache()
        self.view.take(self.store.all())

    async def remove(self, name: str) -> int:
        """Removes a shard."""
        return await remove_shard(self.directory, self.view, OWN, name)

    @property
    def content(self) -> object:
        """What the directory holds."""
        return dict(self.store.entries), dict(self.store.pools)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(shard_removal, "PROBE_SECONDS", 60.0)  # the machine may be slow
    monkeypatch.setattr(shard_removal, "_RETRY_SECONDS", 0.0)
    with listening() as address, refusing() as lost_address:
        yield Cluster(lost_address, address)


async def test_the_record_and_the_claims_of_a_lost_shard_go(cluster: Cluster) -> None:
    entries = dict(cluster.store.entries)
    assert await cluster.remove(LOST) == 2
    assert cluster.store.get(LOST) == VersionedRecord(0, None)
    assert cluster.store.pools == {Q: LIVING}
    for shard in (OWN, LIVING):
        assert cluster.store.get(shard) == entries[shard]


@pytest.mark.parametrize(
    ("name", "kind", "reason", "text"),
    [
        ("", InvalidArgumentError, "INVALID_VALUE", "shard: needs 1 to 64"),
        ("no/name", InvalidArgumentError, "INVALID_VALUE", "shard: needs 1 to 64"),
        ("unknown", NotFoundError, "SHARD_NOT_FOUND", "no shard 'unknown'"),
        (OWN, WrongStateError, "OWN_SHARD", "the server belongs to shard 'own'"),
        (LIVING, WrongStateError, "SHARD_REACHABLE", "something listens at 127.0.0.1:"),
    ],
)
async def test_a_removal_is_refused_and_changes_nothing(
    cluster: Cluster, name: str, kind: type[KvpoolError], reason: str, text: str
) -> None:
    before = cluster.content
    with pytest.raises(kind, match=text) as caught:
        await cluster.remove(name)
    assert (caught.value.reason, caught.value.field) == (reason, "shard")
    assert cluster.content == before


async def test_before_the_directory_was_read_nothing_is_removed(cluster: Cluster) -> None:
    cluster.view, before = DirectoryCache(), cluster.content
    with pytest.raises(UnavailableError) as caught:
        await cluster.remove(LOST)
    assert caught.value.reason == "DIRECTORY_UNKNOWN"
    assert cluster.content == before


class Behind(MemoryDirectory):
    """The directory of a server that acts late: what happens meanwhile happens after each read."""

    def __init__(self, store: Store, meanwhile: Callable[[], None]) -> None:
        super().__init__(store)
        self._meanwhile = meanwhile

    async def get(self, shard: ShardName) -> VersionedRecord:
        entry = await super().get(shard)
        self._meanwhile()
        return entry


async def test_a_shard_whose_server_comes_back_meanwhile_is_kept(cluster: Cluster) -> None:
    store = cluster.store
    cluster.directory = Behind(store, lambda: store.put(LOST, record_at("h:1", term=2)))
    pools = dict(store.pools)
    with pytest.raises(WrongStateError) as caught:
        await cluster.remove(LOST)
    assert (caught.value.reason, caught.value.field) == ("SHARD_CHANGED", "shard")
    assert store.get(LOST).record == record_at("h:1", term=2)
    assert store.pools == pools


async def test_a_damaged_record_is_reported(cluster: Cluster) -> None:
    def fail() -> None:
        raise DamagedRecordError("/kvpool/c/shards/lost in etcd: is not JSON")

    cluster.directory, before = Behind(cluster.store, fail), cluster.content
    with pytest.raises(WrongStateError, match="is not JSON") as caught:
        await cluster.remove(LOST)
    assert (caught.value.reason, caught.value.field) == ("DAMAGED_RECORD", "shard")
    assert cluster.content == before


@pytest.mark.parametrize("fate", Fate)
async def test_a_deletion_is_repeated_until_its_outcome_is_known(cluster: Cluster, fate: Fate) -> None:
    cluster.directory.fates += [fate, fate]
    assert await cluster.remove(LOST) == 2
    assert cluster.store.get(LOST).record is None
    assert cluster.store.pools == {Q: LIVING}


@pytest.mark.parametrize("fate", Fate)
async def test_a_removal_that_ended_early_is_continued_by_another(cluster: Cluster, fate: Fate) -> None:
    cluster.directory.fates += [fate] * 3
    with pytest.raises(UnavailableError, match="call again") as caught:
        await cluster.remove(LOST)
    assert caught.value.reason == "DIRECTORY_DOWN"
    assert cluster.store.pools == {P: LOST, Q: LIVING, R: LOST}
    assert await cluster.remove(LOST) == 2
    assert cluster.store.pools == {Q: LIVING}


async def test_without_the_directory_nothing_is_removed(cluster: Cluster) -> None:
    before = cluster.content
    cluster.directory.is_up = False
    with pytest.raises(UnavailableError) as caught:
        await cluster.remove(LOST)
    assert caught.value.reason == "DIRECTORY_DOWN"
    assert cluster.content == before


async def test_a_new_shard_of_the_same_name_keeps_its_claims(cluster: Cluster) -> None:
    """The claims of before are those of its primary, which releases what it does not use."""
    store = cluster.store
    store.delete(LOST, store.get(LOST).revision)
    cluster.directory = Behind(store, lambda: store.put(LOST, record_at("h:1")))
    assert await cluster.remove(LOST) == 0
    assert store.pools == {P: LOST, Q: LIVING, R: LOST}
