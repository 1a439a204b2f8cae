"""The columns of a step that say on what terms its allocations are made; most steps have none of them."""

from kvpool.core.steps.allocation_options import OPTION_COLUMNS, AllocationOptions
from kvpool.core.steps.columns import Step


def put_options(step: Step, options: AllocationOptions) -> None:
    """Writes the terms of a step's newest operation."""
    before = len(step.operations) - 1
    for name in OPTION_COLUMNS:
        value = getattr(options, name)
        if value:
            column = getattr(step, name)
            column += [0] * (before - len(column))
            column.append(value)


def complete_options(step: Step) -> None:
    """Gives the columns that are there an entry for every operation."""
    for name in OPTION_COLUMNS:
        column = getattr(step, name)
        if column:
            column += [0] * (len(step.operations) - len(column))
