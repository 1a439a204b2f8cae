"""Bounds the claims that a token makes, through one server, for pools that are not created.

1. A claim counts for the token of the call that made it while this server has no pool of its name, for `CLAIM_SECONDS`.
   Then the pool exists in another shard, or the primary of the shard has released the claim.
2. A claim is counted before it is sent to the directory, so calls at the same time do not exceed the maximum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool.core.ids import PoolName
from kvpool.server.auth.caller import token_name
from kvpool.server.limits.config import Limits

CLAIM_SECONDS: Final = 60.0
"""Time after which a claim without a pool has been released: at the second comparison, and some more."""


@dataclass(frozen=True, slots=True)
class _Claim:
    owner: str
    until_seconds: float


class TokenClaims:
    """The claims that tokens have made lately.

    Args:
        limits: The limits.
        pool_names: Returns the names of the server's pools.
        now_seconds: The monotonic time.
    """

    def __init__(
        self, limits: Limits, pool_names: Callable[[], list[PoolName]], now_seconds: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._pool_names = pool_names
        self._now_seconds = now_seconds
        self._claims: dict[PoolName, _Claim] = {}

    def add(self, pool: PoolName, field: str) -> None:
        """Counts a claim for the caller's token, if there are tokens. O(pools + claims).

        Raises:
            ExhaustedError: The token has the maximum; nothing is counted.
        """
        owner, now_seconds = token_name(), self._now_seconds()
        self._claims = {name: claim for name, claim in self._claims.items() if claim.until_seconds > now_seconds}
        if owner:
            without_pool = self._claims.keys() - {pool, *self._pool_names()}
            num_claims = sum(self._claims[name].owner == owner for name in without_pool)
            self._limits.check_token_claims(owner, num_claims, field)
            self._claims[pool] = _Claim(owner, now_seconds + CLAIM_SECONDS)
