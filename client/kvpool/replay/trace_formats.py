"""The lines of request traces. The keys of the first line determine the format of all.

| keys | format | tokens of an id |
|---|---|---|
| `hash_ids`, `input_length`, `output_length` | Mooncake traces | 512 |
| the same and `block_size` | kvpool's own, which `kvpool export-trace` writes | `block_size` |
| `prompt_token_ids` | token ids | 16 |
| `messages` | chats: a request per message of a user | 16 |

A line that begins with neither `{` nor `[` is one of a log of vLLM. Its requests are the lines with `prompt_token_ids`.

1. Equal ids at the start of two prompts mean equal tokens there. Where a trace has none, runs of 16 tokens get ids.
2. Texts have one token per `TEXT_TOKEN_CHARACTERS` characters, because there is no tokenizer.
3. The requests of a trace have at most `MAX_TRACE_IDS` ids, which bounds memory: an id takes at most about 200 bytes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

MOONCAKE_ID_TOKENS: Final = 512
ID_TOKENS: Final = 16
TEXT_TOKEN_CHARACTERS: Final = 4
MAX_LINE_CHARACTERS: Final = 2**24
"""Most characters of a line, which bounds the memory to read it: JSON takes up to 30 bytes per character."""
MAX_REQUEST_TOKENS: Final = 2**22
"""Most tokens of a request of a trace, with its output."""
MAX_TRACE_IDS: Final = 2**23
"""Most ids of all requests of a trace."""
FORMATS: Final = (
    "a trace has JSON lines with hash_ids, input_length and output_length (Mooncake, kvpool export-trace), with "
    "prompt_token_ids, or with messages; or it is a log of vLLM with prompt_token_ids"
)
_MAX_TOKEN_ID: Final = 2**32 - 1
_LOGGED: Final = re.compile(r"Request \S+ details: ")
"""In a line that vLLM 0.32 logs with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG."""
_LOGGED_TOKENS: Final = re.compile(r"[0-9, ]*\]")
_MAX_SHOWN: Final = 100
"""Most characters of the names of keys in an error."""

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
    """Reads the lines of one trace."""

    def __init__(self) -> None:
        self._read: Callable[[_Entry], Iterator[TraceRequest]] | None = None
        self._id_tokens = 0
        self._num_ids = 0
        self._numbers: dict[bytes, int] = {}  # ids of runs of tokens or of text, by their digests

    def requests(self, line: str) -> Iterator[TraceRequest]:
        """Yields the requests of a line. Most lines have one.

        Raises:
            TraceError: It is no line of the trace's format, it is too long, or the trace has too many ids.
        """
        if len(line) > MAX_LINE_CHARACTERS:
            raise TraceError(f"longer than {MAX_LINE_CHARACTERS:,} characters")
        is_first = self._read is None
        if is_first and line.strip() and not line.lstrip().startswith(("{", "[")):
            self._read = self._of_log
        entry = {"line": line} if self._read == self._of_log else _parsed(line)
        if not isinstance(entry, dict):
            raise TraceError(f"not a JSON object; {FORMATS}" if is_first else "not a JSON object")
        if self._read is None:
            self._read = self._format_of(entry)
        for request in self._read(entry):
            self._num_ids += len(request.hash_ids)
            if self._num_ids > MAX_TRACE_IDS:
                raise TraceError(f"hash_ids: the requests so far have more than {MAX_TRACE_IDS:,} ids; use --limit")
            yield request

    def _format_of(self, entry: _Entry) -> Callable[[_Entry], Iterator[TraceRequest]]:
        if "hash_ids" in entry or "input_length" in entry:
            self._id_tokens = MOONCAKE_ID_TOKENS
            if "block_size" in entry:
                self._id_tokens = _integer(entry, "block_size", 1, MAX_REQUEST_TOKENS)
            return self._of_hashes
        if "prompt_token_ids" in entry:
            return self._of_tokens
        if "messages" in entry:
            return self._of_chat
        raise TraceError(f"unknown format: the keys are {_shown(entry)}; {FORMATS}")

    def _of_hashes(self, entry: _Entry) -> Iterator[TraceRequest]:
        if "block_size" in entry and _integer(entry, "block_size", 1, MAX_REQUEST_TOKENS) != self._id_tokens:
            raise TraceError(f"block_size: {entry['block_size']}, in the first entry {self._id_tokens}")
        input_length = _integer(entry, "input_length", 1, MAX_REQUEST_TOKENS)
        output_length = _integer(entry, "output_length", 0, MAX_REQUEST_TOKENS - input_length)
        hash_ids = _integers(entry, "hash_ids")
        wanted = -(-input_length // self._id_tokens)
        if len(hash_ids) != wanted:
            raise TraceError(f"hash_ids: {len(hash_ids)} ids, input_length {input_length} needs {wanted}")
        yield TraceRequest(input_length, output_length, tuple(hash_ids), self._id_tokens)

    def _of_tokens(self, entry: _Entry) -> Iterator[TraceRequest]:
        tokens = _integers(entry, "prompt_token_ids")
        if not 0 < len(tokens) <= MAX_REQUEST_TOKENS:
            raise TraceError(f"prompt_token_ids: {len(tokens)} tokens, not in [1, {MAX_REQUEST_TOKENS}]")
        output_length = 0
        if "output_tokens" in entry:
            output_length = _integer(entry, "output_tokens", 0, MAX_REQUEST_TOKENS - len(tokens))
        ids = [self._number(str(tokens[at : at + ID_TOKENS])) for at in range(0, len(tokens), ID_TOKENS)]
        yield TraceRequest(len(tokens), output_length, tuple(ids), ID_TOKENS)

    def _of_log(self, entry: _Entry) -> Iterator[TraceRequest]:
        # A single pattern for the whole line takes quadratic time on a line with many such beginnings.
        head, _, tail = str(entry["line"]).rpartition("prompt_token_ids: [")
        logged = _LOGGED_TOKENS.match(tail)
        if _LOGGED.search(head) and logged and len(logged[0]) > 1:
            yield from self._of_tokens({"prompt_token_ids": _parsed(f"[{logged[0]}")})

    def _of_chat(self, entry: _Entry) -> Iterator[TraceRequest]:
        messages = entry.get("messages")
        if not isinstance(messages, list):
            raise _wrong(entry, "messages", "a list")
        prompt, ids = "", list[int]()
        span = ID_TOKENS * TEXT_TOKEN_CHARACTERS
        for i, message in enumerate(messages):
            author, text = _message(message, f"messages[{i}]")
            prompt += f"{author}: {text}\n"
            if author != "user":
                continue
            answer = _message(messages[i + 1], f"messages[{i + 1}]")[1] if i + 1 < len(messages) else ""
            input_length, output_length = (-(-len(each) // TEXT_TOKEN_CHARACTERS) for each in (prompt, answer))
            if input_length + output_length > MAX_REQUEST_TOKENS:
                raise TraceError(
                    f"messages[{i}]: {input_length + output_length} tokens, more than {MAX_REQUEST_TOKENS}"
                )
            whole = len(prompt) // span
            ids += [self._number(prompt[at * span : (at + 1) * span]) for at in range(len(ids), whole)]
            rest = prompt[whole * span :]
            yield TraceRequest(input_length, output_length, (*ids, *([self._number(rest)] if rest else ())), ID_TOKENS)

    def _number(self, run: str) -> int:
        """Returns the id of a run of tokens or of text."""
        digest = blake2b(run.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return self._numbers.setdefault(digest, len(self._numbers))


def _parsed(line: str) -> object:
    try:
        entry: object = json.loads(line)
    except RecursionError:
        raise TraceError("not JSON of a trace: its values are nested too deeply") from None
    except ValueError as error:
        raise TraceError(f"not JSON ({error})") from error
    return entry


def _message(message: object, where: str) -> tuple[str, str]:
    """Author and text of a message, under the keys of OpenAI's API."""
    if not isinstance(message, dict):
        raise TraceError(f"{where}: not a JSON object")
    author, text = message.get("role"), message.get("content")
    if not isinstance(author, str):
        raise _wrong(message, f"{where}.role", "a text")
    if isinstance(text, list):  # parts, of which some are texts
        text = "".join(part["text"] for part in text if isinstance(part, dict) and isinstance(part.get("text"), str))
    if text is not None and not isinstance(text, str):
        raise TraceError(f"{where}.content: not a text")
    return author, text or ""


def _integer(entry: _Entry, name: str, low: int, high: int) -> int:
    value = entry.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise _wrong(entry, name, "an integer")
    if not low <= value <= high:
        raise TraceError(f"{name}: {str(value)[:_MAX_SHOWN]} is not in [{low}, {high}]")
    return value


def _integers(entry: _Entry, name: str) -> list[int]:
    values = entry.get(name)
    if not isinstance(values, list) or not all(type(i) is int and 0 <= i <= _MAX_TOKEN_ID for i in values):
        raise _wrong(entry, name, "a list of integers in [0, 2^32)")
    return values


def _wrong(entry: _Entry, name: str, wanted: str) -> TraceError:
    if name.rpartition(".")[2] in entry:
        return TraceError(f"{name}: not {wanted}")
    return TraceError(f"{name}: missing, needs {wanted}; the keys are {_shown(entry)}")


def _shown(entry: _Entry) -> str:
    keys = ", ".join(entry)
    return repr(keys[:_MAX_SHOWN])[1:-1] + "..." * (len(keys) > _MAX_SHOWN) or "none"
