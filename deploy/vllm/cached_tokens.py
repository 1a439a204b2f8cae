"""Sends one prompt to each engine in turn, and prints how many of its tokens each found in the cache.

    python deploy/vllm/cached_tokens.py http://localhost:8000 http://localhost:8001

Engines need `--enable-prompt-tokens-details`. Needs Python only.
"""

import json
import sys
import urllib.request
from typing import Any

_PROMPT = list(range(1, 201))
"""Token ids: the tiny model has no tokenizer."""
_TIMEOUT_SECONDS = 120.0


def _call(url: str, body: dict[str, object] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - the user names it
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - likewise
        answer: dict[str, Any] = json.load(response)
    return answer


def main(engines: list[str]) -> None:
    """Asks each engine. The answers of all must be equal: they compute with the same weights."""
    answers = []
    for engine in engines:
        model = _call(f"{engine}/v1/models")["data"][0]["id"]
        body = {"model": model, "prompt": _PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = _call(f"{engine}/v1/completions", body)
        usage = answer["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        print(  # noqa: T201 - the program's output
            f"{engine}: prompt_tokens={usage['prompt_tokens']} cached_tokens={cached}", flush=True
        )
        answers.append(answer["choices"][0]["token_ids"])
    if any(answer != answers[0] for answer in answers):
        sys.exit(f"the engines answer differently: {answers}")


if __name__ == "__main__":
    main(sys.argv[1:])
