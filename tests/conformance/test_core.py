"""The core gives every answer of the reference, block id for block id."""

from conformance.core_system import CoreSystem
from conformance.golden import Driver, Schedule


def test_the_core_answers_as_the_reference(schedule: Schedule) -> None:
    Driver(CoreSystem(schedule.pool_config()), schedule).run()
