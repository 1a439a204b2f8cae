"""Hostile messages to a server's objects; see campaign. `make test-fuzz` sends a million."""

import re
from pathlib import Path

import pytest

from fuzz.campaign import Campaign
from fuzz.contract import METHODS
from fuzz.run import summary

MAX_GROWTH_BYTES = 32 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.complete)])
async def test_every_call_answers_hostile_messages_as_documented(seed: int) -> None:
    campaign = Campaign(seed)
    await campaign.run(10_000)
    await campaign.close()
    figures = summary([campaign.report], 0)
    assert figures["inputs"] == 10_000
    assert figures["integrity_checks"] == 20
    assert figures["deep_comparisons"]
    assert figures["rss_growth_bytes_per_job"] < MAX_GROWTH_BYTES
    assert "INTERNAL" not in figures["codes"]
    for call, codes in figures["codes_by_call"].items():
        is_refused = call == "AdminService.HandOver"  # the server belongs to no shard
        assert codes.get("OK") or is_refused, f"{call} was never got right, so nothing behind its checks was tried"


def test_every_rpc_documents_its_codes() -> None:
    protos = Path(__file__).parents[2] / "proto" / "kvpool" / "v1"
    declared = sum(len(re.findall(r"^  rpc ", path.read_text(), re.MULTILINE)) for path in protos.glob("*.proto"))
    assert declared == len(METHODS)
    silent = [key for key, method in METHODS.items() if len(method.codes) == 3]
    assert silent == ["AdminService.ListPools", "DirectoryService.GetShard", "DirectoryService.Watch"]
