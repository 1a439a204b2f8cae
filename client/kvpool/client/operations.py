"""The operations of a session as coroutines: each is a step with one row.

Their parameters are those of `StepBuilder`'s methods. Every coroutine here is a method of `AsyncSession`, and of
`Session` in its blocking form.
"""

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvpool.client.results import Admission, Allocation, Answer, HitChanged
from kvpool.client.step_builder import StepBuilder
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import ExhaustedError
from kvpool.core.steps.columns import Outcome

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _one_row(
    add: Callable[Concatenate[StepBuilder, _P], Answer], read: Callable[[Answer], _T]
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Makes a session's method of a step builder's method.

    Args:
        add: Adds the row.
        read: Makes the method's result of the row's answer.
    """

    @wraps(add)
    async def call(session: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:  # noqa: ANN401 - see session.py
        builder = await session._new_settled_step()  # noqa: SLF001 - a method of SessionBase
        answer = add(builder, *args, **kwargs)
        await session._send(builder)  # noqa: SLF001 - a method of SessionBase
        if answer.outcome is Outcome.NEVER_FITS:  # not None, which would have a scheduler try again without end
            message = "the request would hold more blocks than this session ever can: free it, or allocate fewer"
            raise ExhaustedError("REQUEST_NEVER_FITS", message)
        return read(answer)

    result = inspect.signature(read).return_annotation
    # mypy knows no attributes of functions; inspect and help() read this one.
    call.__signature__ = inspect.signature(add).replace(return_annotation=result)  # type: ignore[attr-defined]
    return call


def _computed(answer: Answer) -> ComputedBlocks:
    return answer.computed


def _admission(answer: Answer) -> Admission | None:
    if answer.outcome is not Outcome.OK:
        return None
    return Admission(answer.num_hit_tokens, answer.num_new_tokens, answer.hit_blocks, answer.new_blocks)


def _allocation(answer: Answer) -> Allocation | HitChanged | None:
    if answer.outcome is Outcome.HIT_CHANGED:
        return HitChanged(answer.computed)
    return Allocation(answer.new_blocks) if answer.outcome is Outcome.OK else None


def _is_ok(answer: Answer) -> bool:
    return answer.outcome is Outcome.OK


def _num_common_blocks(answer: Answer) -> list[int]:
    return answer.num_common_blocks


def _nothing(_: Answer) -> None:
    return None


get_computed_blocks = _one_row(StepBuilder.get_computed_blocks, _computed)
admit = _one_row(StepBuilder.admit, _admission)
allocate_slots = _one_row(StepBuilder.allocate_slots, _allocation)
cache_blocks = _one_row(StepBuilder.cache_blocks, _nothing)
free = _one_row(StepBuilder.free, _nothing)
preempt = _one_row(StepBuilder.preempt, _nothing)
evict_blocks = _one_row(StepBuilder.evict_blocks, _nothing)
reset_prefix_cache = _one_row(StepBuilder.reset_prefix_cache, _is_ok)
get_common_prefix_blocks = _one_row(StepBuilder.get_common_prefix_blocks, _num_common_blocks)
