"""The entries of request traces. The keys of the first entry determine the format of all.

| keys | format | tokens of an id |
|---|---|---|
| `hash_ids`, `block_size` | kvpool's own, which `kvpool export-trace` writes | `block_size` |
| `hash_ids`, `chat_id` | Qwen-Bailian usage traces | 16 |
| `hash_ids` | Mooncake traces | 512 |
| `prompt_token_ids` | token ids | 16 |
| `conversations` or `messages` | chats, as in ShareGPT: a request per message of a user | 16 |
| `prompt` | texts, as in the custom data sets of vLLM's benchmarks | 16 |

A line that begins with neither `{` nor `[` is one of a log of vLLM. Its requests are the lines with `prompt_token_ids`.

1. Equal ids at the start of two prompts mean equal tokens there. Where a trace has none, runs of 16 tokens get ids.
2. Texts have one token per `TEXT_TOKEN_CHARACTERS` characters, because there is no tokenizer.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvpool.core.ids import MAX_TOKENS

MOONCAKE_ID_TOKENS: Final = 512
ID_TOKENS: Final = 16
TEXT_TOKEN_CHARACTERS: Final = 4
_MAX_TOKEN_ID: Final = 2**32 - 1
_LOGGED: Final = re.compile(r"Request \S+ details: .*prompt_token_ids: \[([0-9, ]*)\]")
"""A line that vLLM 0.32 logs with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG."""
_USERS: Final = ("user", "human")

_Entry: TypeAlias = Mapping[str, object]


class TraceError(ValueError):
    """A trace cannot be read; the message names the file, the entry and the key."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        input_length: Tokens of the prompt.
        output_length: Tokens to generate.
        hash_ids: One id per `id_tokens` tokens of the prompt; the last may have fewer.
        id_tokens: Tokens of an id.
    """

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    id_tokens: int = MOONCAKE_ID_TOKENS

    def token_ids(self) -> list[int]:
        """Makes a prompt. An id h is the token h, `id_tokens` times, so that prefixes match with any block size."""
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            tokens += [hash_id] * self.id_tokens
        del tokens[self.input_length :]
        return tokens


class EntryReader:
    """Reads the entries of one trace."""

    def __init__(self) -> None:
        self._read: Callable[[_Entry], Iterator[TraceRequest]] | None = None
        self._id_tokens = 0
        self._numbers: dict[object, int] = {}  # ids of runs of tokens or of text

    def requests(self, entry: object) -> list[TraceRequest]:
        """Returns the requests of an entry: a line, or an object of an array. Most entries have one.

        Raises:
            TraceError: It is no entry of the trace's format.
        """
        if isinstance(entry, str):
            if self._read is None and entry.strip() and not entry.lstrip().startswith(("{", "[")):
                self._read = self._of_log
            entry = {"line": entry} if self._read == self._of_log else _parsed(entry)
        if not isinstance(entry, dict):
            raise TraceError("not a JSON object")
        if self._read is None:
            self._read = self._format_of(entry)
        return list(self._read(entry))

    def _format_of(self, entry: _Entry) -> Callable[[_Entry], Iterator[TraceRequest]]:
        if "hash_ids" in entry or "input_length" in entry:
            self._id_tokens = MOONCAKE_ID_TOKENS
            if "block_size" in entry:
                self._id_tokens = _integer(entry, "block_size", 1, MAX_TOKENS)
            elif "chat_id" in entry:
                self._id_tokens = ID_TOKENS
            return self._of_hashes
        for key, read in (
            ("prompt_token_ids", self._of_tokens),
            ("conversations", self._of_chat),
            ("messages", self._of_chat),
            ("prompt", self._of_text),
        ):
            if key in entry:
                return read
        wanted = "hash_ids, prompt_token_ids, conversations, messages, prompt"
        raise TraceError(f"unknown format: the entry has none of the keys {wanted}")

    def _of_hashes(self, entry: _Entry) -> Iterator[TraceRequest]:
        if "block_size" in entry and _integer(entry, "block_size", 1, MAX_TOKENS) != self._id_tokens:
            raise TraceError(f"block_size: {entry['block_size']}, in the first entry {self._id_tokens}")
        _number(entry, "timestamp")
        input_length = _integer(entry, "input_length", 1, MAX_TOKENS)
        output_length = _integer(entry, "output_length", 0, MAX_TOKENS - input_length)
        hash_ids = _integers(entry, "hash_ids")
        wanted = -(-input_length // self._id_tokens)
        if len(hash_ids) != wanted:
            raise TraceError(f"hash_ids: {len(hash_ids)} ids, input_length {input_length} needs {wanted}")
        yield TraceRequest(input_length, output_length, tuple(hash_ids), self._id_tokens)

    def _of_tokens(self, entry: _Entry) -> Iterator[TraceRequest]:
        tokens = _integers(entry, "prompt_token_ids")
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise TraceError(f"prompt_token_ids: {len(tokens)} tokens, not in [1, {MAX_TOKENS}]")
        output_length = 0
        if "output_tokens" in entry:
            output_length = _integer(entry, "output_tokens", 0, MAX_TOKENS - len(tokens))
        runs = [tuple(tokens[at : at + ID_TOKENS]) for at in range(0, len(tokens), ID_TOKENS)]
        yield self._request(runs, len(tokens), output_length)

    def _of_log(self, entry: _Entry) -> Iterator[TraceRequest]:
        logged = _LOGGED.search(str(entry["line"]))
        if logged and logged[1]:
            yield from self._of_tokens({"prompt_token_ids": json.loads(f"[{logged[1]}]")})

    def _of_text(self, entry: _Entry) -> Iterator[TraceRequest]:
        prompt, output_length = _text(entry, "prompt"), 0
        if "output_tokens" in entry:
            output_length = _integer(entry, "output_tokens", 0, MAX_TOKENS)
        if prompt:
            yield self._text_request(prompt, output_length)

    def _of_chat(self, entry: _Entry) -> Iterator[TraceRequest]:
        key = "conversations" if "conversations" in entry else "messages"
        turns = entry.get(key)
        if not isinstance(turns, list):
            raise TraceError(f"{key}: missing, or not a list")
        prompt = ""
        for i, turn in enumerate(turns):
            author, text = _turn(turn, f"{key}[{i}]")
            prompt += f"{author}: {text}\n"
            if author in _USERS:
                answer = _turn(turns[i + 1], f"{key}[{i + 1}]")[1] if i + 1 < len(turns) else ""
                yield self._text_request(prompt, -(-len(answer) // TEXT_TOKEN_CHARACTERS))

    def _text_request(self, prompt: str, output_length: int) -> TraceRequest:
        span = ID_TOKENS * TEXT_TOKEN_CHARACTERS
        length = -(-len(prompt) // TEXT_TOKEN_CHARACTERS)
        if length + output_length > MAX_TOKENS:
            raise TraceError(f"the text has {length + output_length} tokens, more than {MAX_TOKENS}")
        return self._request([prompt[at : at + span] for at in range(0, len(prompt), span)], length, output_length)

    def _request(self, runs: Sequence[object], input_length: int, output_length: int) -> TraceRequest:
        ids = tuple(self._numbers.setdefault(run, len(self._numbers)) for run in runs)
        return TraceRequest(input_length, output_length, ids, ID_TOKENS)


def _parsed(line: str) -> object:
    try:
        entry: object = json.loads(line)
    except ValueError as error:
        raise TraceError(f"not JSON ({error})") from error
    return entry


def _turn(turn: object, where: str) -> tuple[str, str]:
    """Author and text of a message, under the keys of ShareGPT or of OpenAI's API."""
    if not isinstance(turn, dict):
        raise TraceError(f"{where}: not a JSON object")
    author, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(author, str):
        raise TraceError(f"{where}: from or role is missing, or not a text")
    if isinstance(text, list):  # parts, of which some are texts
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
    if text is not None and not isinstance(text, str):
        raise TraceError(f"{where}: value or content is not a text")
    return author, text or ""


def _text(entry: _Entry, name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise TraceError(f"{name}: missing, or not a text")
    return value


def _number(entry: _Entry, name: str) -> None:
    if type(entry.get(name)) not in {int, float}:
        raise TraceError(f"{name}: missing, or not a number")


def _integer(entry: _Entry, name: str, low: int, high: int) -> int:
    value = entry.get(name)
    if type(value) is not int:
        raise TraceError(f"{name}: missing, or not an integer")
    if not low <= value <= high:
        raise TraceError(f"{name}: {value} is not in [{low}, {high}]")
    return value


def _integers(entry: _Entry, name: str) -> list[int]:
    values = entry.get(name)
    if not isinstance(values, list) or not all(type(i) is int and 0 <= i <= _MAX_TOKEN_ID for i in values):
        raise TraceError(f"{name}: missing, or not a list of integers in [0, 2^32)")
    return values
