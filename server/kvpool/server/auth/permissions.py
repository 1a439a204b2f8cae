"""Permissions of each RPC. An RPC without a rule is refused, and a test detects it."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kvpool.server.auth.tokens import Role


class Scope(Enum):
    """The field of a request that names its pool or session."""

    POOL = auto()
    """`pool_name`."""
    CONFIG = auto()
    """`config.name`."""
    SESSION = auto()
    """`session_id`."""
    POOL_OR_SERVER = auto()
    """`pool_name`. Empty: the whole server, which requires a token for all pools."""
    SERVER = auto()
    """The whole server, which requires a token for all pools."""
    POOL_OR_VISIBLE = auto()
    """`pool_name`. Empty: all pools that the token covers; the service filters them."""
    VISIBLE = auto()
    """All pools that the token covers; the service filters them."""
    FIRST_MESSAGE = auto()
    """The first message of the stream: the service then calls `caller.check_session` or `check_pool`."""
    NOTHING = auto()
    """The method concerns no pool."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Permissions of a method.

    Attributes:
        roles: Roles that may call the method.
        scope: Field that is compared with the pools or sessions of the token.
    """

    roles: frozenset[Role]
    scope: Scope


def rule_of(method: str) -> Rule | None:
    """The rule of a method, named `package.Service/Method`; None for a method that needs no token."""
    if method.startswith(_OPEN_SERVICE):
        return None
    return RULES.get(method, _NO_ROLE)


_OPEN_SERVICE: Final = "grpc.health.v1.Health/"
_ALL_ROLES: Final = Rule(frozenset(Role), Scope.NOTHING)
_NO_ROLE: Final = Rule(frozenset(), Scope.POOL_OR_SERVER)


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
            Scope.POOL: "WaitUntilReady OpenSession",
            Scope.SESSION: "KeepAlive CloseSession GetComputedBlocks AllocateSlots CacheBlocks Free "
            "EvictBlocks ResetPrefixCache GetCommonPrefixBlocks MarkExecuted "
            "SetWeightsVersion",
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
            Scope.POOL: "ListRequests ListBlocks ExplainMisses ExplainPrompt ResetPrefixCache EvictSession "
            "SetWeightsVersion RemovePool",
            Scope.POOL_OR_SERVER: "Drain Undrain",
            Scope.SERVER: "HandOver",
        },
    ),
    "kvpool.v1.AllocatorService/GetPool": Rule(frozenset((Role.SCHEDULER, Role.WORKER, Role.ADMIN)), Scope.POOL),
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL_ROLES,
    **{f"kvpool.v1.DirectoryService/{method}": _ALL_ROLES for method in ("Watch", "GetShard")},
}
"""The rule of each method."""
