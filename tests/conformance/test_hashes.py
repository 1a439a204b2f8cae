"""Block hashes equal the reference's vectors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.hashing import NO_EXTRA_KEYS, BlockHasher, ExtraKeys
from kvpool.core.ids import BlockHash
from kvpool.core.specs.pool_config import HashScheme


@dataclass(frozen=True)
class StatedKeys(ExtraKeys):
    """The extra keys of a block, as a vector states them."""

    stated: Sequence[object] = ()

    def of_block(self, *_: object, **__: object) -> list[object]:
        return list(self.stated)


def vectors(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.rglob("hashes.json"))
    if not paths:
        pytest.skip(f"no hashes.json below {folder}")
    return [vector for path in paths for vector in json.loads(path.read_text())]


def test_every_hash_vector_matches(golden_folder: Path) -> None:
    for vector in vectors(golden_folder):
        scheme = HashScheme(vector["algorithm"], none_hash=bytes.fromhex(vector["none_hash"]))
        hashes = [BlockHash(bytes.fromhex(vector["parent"]))] if vector["parent"] else []
        token_ids, extra_keys = [0] * 16 * len(hashes) + vector["token_ids"], vector["extra_keys"]
        keys = StatedKeys(stated=extra_keys) if extra_keys else NO_EXTRA_KEYS
        BlockHasher(scheme, block_size=16).extend(hashes, token_ids, keys)
        assert hashes[-1].hex() == vector["hash"], vector
        assert len(hashes[-1]) == scheme.hash_size_bytes
