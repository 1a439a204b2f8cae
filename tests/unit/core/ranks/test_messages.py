"""Options that all ranks of a pool share."""

import pytest

from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.core.specs.base import MambaCacheMode
from support.refusals import refused


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (RankGroupOptions(1024, prefill_context_parallel_size=2), "prefill_context_parallel_size"),
        (RankGroupOptions(1024, mamba_cache_mode=MambaCacheMode.ALIGN), "mamba_cache_mode"),
    ],
)
def test_plan_options_that_the_wire_does_not_carry_are_refused(options: RankGroupOptions, field: str) -> None:
    with refused(field=field):
        options.check()
