"""The core gives every answer of the reference, block id for block id."""

import pytest

from conformance.core_system import CoreSystem
from conformance.golden import Driver, Schedule

_INTEGRITY_INTERVALS = {"quick": 64, "change": 8, "all": 1}


def test_the_core_answers_as_the_reference(schedule: Schedule, pytestconfig: pytest.Config) -> None:
    system = CoreSystem(schedule.pool_config(), _INTEGRITY_INTERVALS[pytestconfig.getoption("depth")])
    Driver(system, schedule).run()
    system.check()
