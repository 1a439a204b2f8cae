"""Block hashes equal the reference's vectors."""

import json
from pathlib import Path

import pytest

from kvpool.client.hashing import BlockHasher
from kvpool.core.ids import BlockHash
from kvpool.core.specs.pool_config import HashScheme


def vectors(folder: Path) -> list[dict[str, object]]:
    paths = sorted(folder.rglob("hashes.json"))
    if not paths:
        pytest.skip(f"no hashes.json below {folder}")
    return [vector for path in paths for vector in json.loads(path.read_text())]


def test_every_hash_vector_matches(golden_folder: Path) -> None:
    for vector in vectors(golden_folder):
        scheme = HashScheme(str(vector["algorithm"]), none_hash=bytes.fromhex(str(vector["none_hash"])))
        hasher = BlockHasher(scheme, block_size=16)
        parent = BlockHash(bytes.fromhex(str(vector["parent"]))) if vector["parent"] else None
        answer = hasher.hash_block(parent, vector["token_ids"], vector["extra_keys"])  # type: ignore[arg-type]
        assert answer.hex() == vector["hash"], vector
        assert len(answer) == scheme.hash_size_bytes
