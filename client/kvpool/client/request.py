"""A request of a scheduler: its tokens, hashes, and a copy of its block tables."""

import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Final

from kvpool.client.hashing import NO_EXTRA_KEYS, BlockHasher, ExtraKeys
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import BlockHash, RequestId, RequestNumber

_MAX_TOKEN_ID: Final = 2**32 - 1


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A request of a session; make it with `Session.request`.

    Attributes:
        request_id: Its id, unique in the session.
        number: Its number in steps, chosen by the session.
        token_ids: Prompt and output. Only `append` may change it.
        hasher: Hashes its blocks; None if the pool does not cache, or the engine hashes the blocks itself.
        extra_keys: LoRA, cache salt and multimodal items, which determine its contents together with the tokens.
        trace_parent: Its W3C trace context (traceparent), of which the server's spans of its admissions become
            children; empty for none. A malformed one counts as none.
        known_hashes: The hashes computed so far, or the list that the engine extends. See `hashes`.
        num_prompt_tokens: New length of its prompt, if it differs from the length with which the request was declared,
            for example when a conversation continues in one request. The next operation other than a decode sends it
            to the service and resets it to 0.
        block_ids: Its block table of each group, in the order of the tokens. Kept up to date by the session.
        num_computed_tokens: Tokens that have slots, hits included: the next allocation starts there. The session sets
            it.
        credit_tokens: Number of computed tokens that it can reach on credit, without a message to the service, in the
            blocks of its tables.
        reserve_ids: Blocks of each group that it holds beyond its block tables, in reserve; empty without a reserve.
        held_tokens: Number of computed tokens that it can reach on credit with the blocks in reserve, too.
        num_run_tokens: Number of tokens that had certainly run when it was last allocated a slot, in pools with
            windows: blocks that these leave behind a window can be freed.
        declared: Whether the service knows it.
        freed: Whether it was freed. A look-up or an admission declares it again.
        num_sent_computed_tokens: Its computed tokens, as the service knows them.
        num_sent_tokens: Number of its tokens that the service knows.
    """

    request_id: RequestId
    number: RequestNumber
    token_ids: list[int]
    num_groups: InitVar[int]
    hasher: BlockHasher | None = None
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    known_hashes: list[BlockHash] = field(default_factory=list)
    trace_parent: str = ""
    num_prompt_tokens: int = field(default=0, init=False)
    block_ids: list[list[int]] = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    credit_tokens: int = field(default=0, init=False)
    reserve_ids: list[list[int]] = field(default_factory=list, init=False)
    held_tokens: int = field(default=0, init=False)
    num_run_tokens: int = field(default=0, init=False)
    declared: bool = field(default=False, init=False)
    freed: bool = field(default=False, init=False)
    num_sent_computed_tokens: int = field(default=0, init=False)
    num_sent_tokens: int = field(default=0, init=False)

    def __post_init__(self, num_groups: int) -> None:
        self.block_ids = [[] for _ in range(num_groups)]
        if self.hasher:
            self.hasher.extend(self.known_hashes, self.token_ids, self.extra_keys)

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r}: {self.num_tokens} tokens, {self.num_computed_tokens} computed>"

    @property
    def num_tokens(self) -> int:
        """Tokens known, prompt and output."""
        return len(self.token_ids)

    @property
    def hashes(self) -> list[BlockHash]:
        """The hash of each full block of the tokens, if the pool caches. Each is computed once."""
        hashes, hasher = self.known_hashes, self.hasher
        if hasher and (len(hashes) + 1) * hasher.block_size + hasher.num_lookahead_tokens <= len(self.token_ids):
            hasher.extend(hashes, self.token_ids, self.extra_keys)
        return hashes

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds generated tokens. They are sent to the server with the next call.

        Raises:
            InvalidArgumentError: One is not an integer in [0, 2^32). Nothing is added.
        """
        self.token_ids.extend(checked_token_ids(token_ids))

    def forget_blocks(self) -> None:
        """Empties the block tables, after the blocks were freed."""
        self.block_ids, self.reserve_ids = [[] for _ in self.block_ids], []
        self.num_computed_tokens = self.credit_tokens = self.held_tokens = self.num_run_tokens = 0


def hash_filled_blocks(requests: Sequence[Request]) -> None:
    """Hashes the blocks that decodes of a session filled, together. Otherwise `Request.hashes` hashes one at a time."""
    hasher = requests[0].hasher if requests else None
    if not hasher or hasher.num_lookahead_tokens:
        return
    size = hasher.block_size
    filled = []
    for request in requests:
        hashes, token_ids = request.known_hashes, request.token_ids
        if len(token_ids) // size == len(hashes) + 1 and request.extra_keys is NO_EXTRA_KEYS:
            filled.append((hashes, token_ids))
    hasher.extend_each(filled)


def checked_token_ids(token_ids: Iterable[int]) -> list[int]:
    """Returns token ids as a list of plain integers; a list of these is returned as it is. About 60 ns per token.

    Raises:
        InvalidArgumentError: One is not an integer in [0, 2^32). Names the first, as `token_ids[3]`.
    """
    found = token_ids if type(token_ids) is list else list(token_ids)
    try:
        array("I", found)  # raises for what is no integer, and for what is out of range
        if operator.countOf(map(type, found), int) == len(found):  # array() takes booleans and integers of NumPy
            return found
    except (TypeError, OverflowError, ValueError):
        pass
    return [_plain(i, token_id) for i, token_id in enumerate(found)]


def _plain(i: int, token_id: object) -> int:
    try:
        plain = -1 if isinstance(token_id, bool) else operator.index(token_id)  # type: ignore[arg-type]  # may raise
    except TypeError:
        plain = -1
    if not 0 <= plain <= _MAX_TOKEN_ID:
        raise InvalidArgumentError(f"token_ids[{i}]", f"{token_id!r} is not an integer in [0, {_MAX_TOKEN_ID}]")
    return plain
