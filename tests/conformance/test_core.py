"""The core gives every answer of the reference, block id for block id."""

import pytest

from conformance.core_system import CoreSystem
from conformance.golden import Driver, Schedule


def test_the_core_answers_as_the_reference(schedule: Schedule, pytestconfig: pytest.Config) -> None:
    is_thorough = pytestconfig.getoption("depth") == "all"
    system = CoreSystem(schedule.pool_config(), integrity_interval=1 if is_thorough else 8)
    Driver(system, schedule).run()
    system.check()
