"""A request of a scheduler: its tokens, hashes, and a copy of its block tables."""

from collections.abc import Sequence

from kvpool.client.hashing import NO_EXTRA_KEYS, BlockHasher, ExtraKeys
from kvpool.core.ids import BlockHash, RequestId, RequestNumber


class Request:
    """A request of a session; make it with `Session.request`.

    Attributes:
        request_id: Its id, unique in the session.
        number: Its number in steps, chosen by the session.
        token_ids: Prompt and output. Only `append` may change it.
        block_ids: Its block table of each group, in the order of the tokens. Kept up to date by the session.
        credit_tokens: Number of computed tokens up to which it can allocate on credit, without a message to the
            service. Kept by the session.
        num_credit_tokens: Credit that is left; none if negative. Counted down: most decodes change only this and the
            tokens.
        extra_keys: LoRA, cache salt and multimodal items, which determine its contents together with the tokens.
    """

    __slots__ = (
        "_hasher",
        "_hashes",
        "block_ids",
        "credit_tokens",
        "declared",
        "extra_keys",
        "num_credit_tokens",
        "num_sent_computed_tokens",
        "num_sent_hashes",
        "num_sent_tokens",
        "number",
        "request_id",
        "token_ids",
    )

    def __init__(  # noqa: PLR0913 - only sessions call it
        self,
        request_id: str,
        number: int,
        token_ids: Sequence[int],
        *,
        num_groups: int,
        hasher: BlockHasher | None,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        self.request_id = RequestId(request_id)
        self.number = RequestNumber(number)
        self.token_ids = list(token_ids)
        self.extra_keys = extra_keys
        self._hashes: list[BlockHash] = []
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.credit_tokens = 0
        self.num_credit_tokens = 0
        self.declared = False
        self.num_sent_computed_tokens = 0
        self.num_sent_tokens = 0
        self.num_sent_hashes = 0
        self._hasher = hasher
        if hasher:
            hasher.extend(self._hashes, self.token_ids, extra_keys)

    def share(self, token_ids: list[int], hashes: list[BlockHash]) -> None:
        """Uses the token and hash lists of another owner. They may grow, and are never changed here."""
        self.token_ids, self._hashes, self._hasher = token_ids, hashes, None

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r}: {self.num_tokens} tokens, {self.num_computed_tokens} computed>"

    @property
    def num_tokens(self) -> int:
        """Tokens known, prompt and output."""
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that have slots, hits included; the next allocation starts there. Kept by the session."""
        return self.credit_tokens - self.num_credit_tokens

    def set_computed(self, num_computed_tokens: int, credit_tokens: int) -> None:
        """Sets the number of tokens that have slots, and the number up to which it can allocate on credit."""
        self.credit_tokens = credit_tokens
        self.num_credit_tokens = credit_tokens - num_computed_tokens

    @property
    def hashes(self) -> list[BlockHash]:
        """The hash of each full block of the tokens, if the pool caches. Each is computed once."""
        hashes, hasher = self._hashes, self._hasher
        if hasher and (len(hashes) + 1) * hasher.block_size <= len(self.token_ids):
            hasher.extend(hashes, self.token_ids, self.extra_keys)
        return hashes

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds generated tokens. They are sent to the server with the next call."""
        self.token_ids += token_ids

    def forget_blocks(self) -> None:
        """Empties the block tables, after the blocks were freed."""
        self.block_ids = [[] for _ in self.block_ids]
        self.credit_tokens = self.num_credit_tokens = 0


def hash_filled_blocks(requests: Sequence[Request]) -> None:
    """Hashes the blocks that decodes of a session filled, together. Otherwise `Request.hashes` hashes one at a time."""
    hasher = requests[0]._hasher if requests else None  # noqa: SLF001 - this module's class
    if not hasher:
        return
    size = hasher.block_size
    filled = []
    for request in requests:
        hashes, token_ids = request._hashes, request.token_ids  # noqa: SLF001 - this module's class
        if len(token_ids) // size == len(hashes) + 1 and request.extra_keys is NO_EXTRA_KEYS:
            filled.append((hashes, token_ids))
    hasher.extend_each(filled)
