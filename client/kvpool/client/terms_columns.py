"""The columns of a step that say on what terms its allocations are made; most steps have none of them."""

from kvpool.core.steps.columns import Step
from kvpool.core.steps.options import TERMS_COLUMNS, Terms


def put_terms(step: Step, terms: Terms) -> None:
    """Writes the terms of a step's newest operation."""
    before = len(step.operations) - 1
    for name in TERMS_COLUMNS:
        value = getattr(terms, name)
        if value:
            column = getattr(step, name)
            column += [0] * (before - len(column))
            column.append(value)


def complete_terms(step: Step) -> None:
    """Gives the columns that are there an entry for every operation."""
    for name in TERMS_COLUMNS:
        column = getattr(step, name)
        if column:
            column += [0] * (len(step.operations) - len(column))
