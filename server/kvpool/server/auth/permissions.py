"""Who may call what: one rule for every method. A method without a rule is refused, and a test misses it."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from kvpool.server.auth.tokens import Role


class Scope(Enum):
    """Where a request says what it is about."""

    POOL = auto()
    """`pool_name`."""
    CONFIG = auto()
    """`config.name`."""
    SESSION = auto()
    """`session_id`."""
    POOL_OR_SERVER = auto()
    """`pool_name`; empty is the whole server, which is for tokens of all pools."""
    POOL_OR_VISIBLE = auto()
    """`pool_name`; empty is all pools, of which the service tells the token's."""
    VISIBLE = auto()
    """All pools, of which the service tells the token's."""
    FIRST_MESSAGE = auto()
    """The first message of the stream: the service asks `caller.check_session` or `check_pool` when it is there."""
    NOTHING = auto()
    """Nothing of any pool."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call a method.

    Attributes:
        roles: The roles that may; admins always may.
        scope: What the token's pools are compared with.
    """

    roles: frozenset[Role]
    scope: Scope


def pool_name_of(scope: Scope, request: Any) -> str | None:  # noqa: ANN401 - a message of any kind
    """The pool that a request names; None if its scope is another."""
    if scope is Scope.CONFIG:
        return str(request.config.name)
    if scope in (Scope.POOL, Scope.POOL_OR_SERVER) or (scope is Scope.POOL_OR_VISIBLE and request.pool_name):
        return str(request.pool_name)
    return None


def session_id_of(scope: Scope, request: Any) -> str | None:  # noqa: ANN401 - likewise
    """The session that a request names; None if its scope is another."""
    return str(request.session_id) if scope is Scope.SESSION else None


def rule_of(method: str) -> Rule | None:
    """The rule of a method, named `package.Service/Method`; None for one that anybody may call."""
    if method.startswith(_OPEN_SERVICE):
        return None
    return RULES.get(method, _NOBODY)


_OPEN_SERVICE: Final = "grpc.health.v1.Health/"
_ANYBODY: Final = Rule(frozenset(Role), Scope.NOTHING)
_NOBODY: Final = Rule(frozenset(), Scope.POOL_OR_SERVER)


def _rules(service: str, role: Role, scopes: dict[Scope, str]) -> dict[str, Rule]:
    return {
        f"kvpool.v1.{service}/{method}": Rule(frozenset((role, Role.ADMIN)), scope)
        for scope, methods in scopes.items()
        for method in methods.split()
    }


RULES: Final = {
    **_rules(
        "AllocatorService",
        Role.SCHEDULER,
        {
            Scope.CONFIG: "CreatePool",
            Scope.POOL: "GetPool WaitUntilReady OpenSession",
            Scope.SESSION: "ResumeSession KeepAlive CloseSession GetComputedBlocks AllocateSlots CacheBlocks Free "
            "EvictBlocks ResetPrefixCache GetCommonPrefixBlocks MarkExecuted",
            Scope.FIRST_MESSAGE: "Schedule",
        },
    ),
    **_rules("WorkerService", Role.WORKER, {Scope.FIRST_MESSAGE: "Join"}),
    **_rules("EventService", Role.WATCHER, {Scope.POOL: "Watch"}),
    **_rules(
        "AdminService",
        Role.ADMIN,
        {
            Scope.VISIBLE: "ListPools",
            Scope.POOL_OR_VISIBLE: "ListSessions",
            Scope.POOL: "ListRequests ListBlocks ResetPrefixCache EvictSession RemovePool",
            Scope.POOL_OR_SERVER: "Drain Undrain",
        },
    ),
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANYBODY,
}
"""By method: its rule."""
