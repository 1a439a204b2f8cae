import pytest

from kvpool.core.ranks.messages import LinkId
from support.ranks import Gathering


@pytest.fixture
def world() -> Gathering:
    return Gathering()


@pytest.fixture
def links(world: Gathering) -> list[LinkId]:
    """Links of two ranks, whose pool is open."""
    return world.form()
