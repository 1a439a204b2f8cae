"""Sentences that explain misses, and what to change."""

from collections.abc import Iterator
from typing import Final

from kvpool.cli.text import counted, percent
from kvpool.client import PoolInfo
from kvpool.client.admin import GroupEnd, MissesInfo, MissReason
from kvpool.core.ids import GroupId

_MIN_SHARE: Final = 0.01
"""Share of the missed tokens below which a reason gets no hint."""

MEANINGS: Final = {
    MissReason.UNSEEN: "never cached, or lost too long ago to be known",
    MissReason.EVICTED: "evicted",
    MissReason.RESET: "lost by a reset or a new epoch",
    MissReason.OTHER_SCOPE: "cached under another weights version or namespace",
    MissReason.NOT_EXECUTED: "cached, but its step is not reported as executed",
    MissReason.NOT_KEPT: "the group keeps nothing at this length",
    MissReason.ALIGNMENT: "shorter than a block of the group with the largest blocks",
    MissReason.SEARCH_LIMIT: "the search reached its maximum number of tries",
}


def missed_tokens(info: PoolInfo) -> int:
    """Tokens that all counted look-ups of a pool have missed."""
    return sum(miss.tokens for group in info.groups for miss in group.misses)


def hints(info: PoolInfo, facts: MissesInfo) -> list[str]:
    """Returns what to change, the most expensive reason first; then what always limits the hits of the pool."""
    if not info.config.enable_caching:
        return ["The pool does not cache: it was declared with enable_caching=False."]
    tokens: dict[MissReason, int] = {}
    for group in info.groups:
        for miss in group.misses:
            tokens[miss.reason] = tokens.get(miss.reason, 0) + miss.tokens
    total = sum(tokens.values())
    found = [
        f"{percent(tokens[reason] / total)} of the missed tokens: {_HINTS[reason](info, facts)}"
        for reason in sorted(tokens, key=lambda each: -tokens[each])
        if tokens[reason] >= _MIN_SHARE * total
    ]
    return [*found, *_limits(info)]


def _limits(info: PoolInfo) -> Iterator[str]:
    config = info.config
    spans, alignment = config.spans_tokens, config.hit_alignment
    if alignment > min(spans):
        group = max(range(len(spans)), key=lambda i: spans[i] if alignment % spans[i] == 0 else 0)  # not circular ones
        yield (
            f"Hits are multiples of {alignment:,} tokens: a block of group {group} ({info.groups[group].kind}) covers "
            f"{spans[group]:,} tokens. Prompts of up to {alignment:,} tokens never hit."
        )
    elif min(spans) > 1:
        yield f"Hits are multiples of {alignment:,} tokens. Prompts of up to {alignment:,} tokens never hit."


def _evicted(info: PoolInfo, facts: MissesInfo) -> str:
    needed = facts.remembered_evictions
    return (
        f"evicted lately. With at most {counted(needed, 'block')} more than the {info.config.num_blocks:,} of the pool "
        "these prefixes would still be cached. Add blocks, or send requests with a common prefix closer together."
    )


def _reset(info: PoolInfo, _: MissesInfo) -> str:
    return (
        f"lost by a reset ({counted(info.prefix_cache.resets, 'reset')} so far) or with the epoch before (epoch "
        f"{info.epoch} now). They end once the prefixes are computed again."
    )


def _other_scope(_: PoolInfo, facts: MissesInfo) -> str:
    versions = sorted({scope.weights_version for scope in facts.scopes})
    named = ", ".join(version or "none" for version in versions)
    has_namespaces = any(scope.has_namespace for scope in facts.scopes)
    salts = " Tokens with different salts share nothing." if has_namespaces else ""
    return f"cached under another weights version or namespace. Weights versions in use: {named}.{salts}"


def _not_executed(_: PoolInfo, facts: MissesInfo) -> str:
    sessions = ", ".join(str(each.session_number) for each in facts.unexecuted)
    now = f" Now sessions {sessions} have such blocks." if sessions else ""
    return (
        f"computed by a step that its session had not reported as executed. Report steps sooner (mark_executed).{now}"
    )


def _not_kept(info: PoolInfo, _: MissesInfo) -> str:
    groups = [
        str(i) for i, group in enumerate(info.groups) if any(m.reason is MissReason.NOT_KEPT for m in group.misses)
    ]
    retention = info.config.retention_tokens
    cause = "the windows or states are not cached at each length that other groups have"
    if retention is not None:
        cause = f"windows are kept at multiples of retention_tokens ({retention:,}) and at the end of prompts only"
    return f"{'group' if len(groups) == 1 else 'groups'} {', '.join(groups)}: {cause}."


def _alignment(_: PoolInfo, __: MissesInfo) -> str:
    return "found as far as whole blocks of all groups reach. Only smaller blocks in the largest group change this."


def _unseen(_: PoolInfo, __: MissesInfo) -> str:
    return (
        "never cached as far as is known. Prompts that look equal differ if tokens, salt, LoRA or images do: see "
        "`--tokens FILE`."
    )


def _search_limit(_: PoolInfo, __: MissesInfo) -> str:
    return "the search gave up, because a small window was cached in many short pieces."


_HINTS: Final = {
    MissReason.UNSEEN: _unseen,
    MissReason.EVICTED: _evicted,
    MissReason.RESET: _reset,
    MissReason.OTHER_SCOPE: _other_scope,
    MissReason.NOT_EXECUTED: _not_executed,
    MissReason.NOT_KEPT: _not_kept,
    MissReason.ALIGNMENT: _alignment,
    MissReason.SEARCH_LIMIT: _search_limit,
}


def end_sentence(group_id: GroupId, end: GroupEnd) -> str:
    """Says why a group ends a look-up, with what is known of the block that it lacks."""
    if end.reason is None or end.missing_block is None:
        return f"group {group_id} has all {end.max_tokens:,} tokens that a hit can cover"
    first = end.missing_block * end.span_tokens
    lacks = f"group {group_id} lacks block {end.missing_block:,}, tokens {first:,} to {first + end.span_tokens - 1:,}"
    details = []
    if end.weights_versions:
        details.append(f"weights versions {', '.join(version or 'none' for version in end.weights_versions)} have it")
    if end.is_in_other_namespace:
        details.append("another namespace has it")
    if end.filling_session_number:
        details.append(f"session {end.filling_session_number} fills it")
    return f"{lacks}: {'; '.join([MEANINGS[end.reason], *details])}"
