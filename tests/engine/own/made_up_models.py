"""Models under the names that vLLM's tests give, so that none comes from the network.

Tests of schedulers read little of a model: a configuration and a tokenizer. All are one small text model, but for one
that predicts tokens. Tests run where the names are folders, which vLLM prefers to the network. Models that take images
would need torchvision: `EncoderBudget` is all that a scheduler reads of them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from vllm.multimodal.encoder_budget import compute_mm_encoder_budget

from engine.models import LLAMA, QWEN3_NEXT

_TEXT: Final = {**LLAMA, "max_position_embeddings": 2048}
_LONG: Final = {**LLAMA, "max_position_embeddings": 32768}
_IMAGE_TOKENS: Final = 576
TAKES_IMAGES: Final = frozenset({"llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2.5-VL-3B-Instruct"})
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "facebook/opt-125m": _TEXT,
    "facebook/opt-350m": _TEXT,
    "hmellor/tiny-random-LlamaForCausalLM": _TEXT,
    "meta-llama/Llama-3.2-1B-Instruct": _TEXT,
    "llava-hf/llava-1.5-7b-hf": {**LLAMA, "max_position_embeddings": 4096},
    "Qwen/Qwen2.5-VL-3B-Instruct": _LONG,
    "Qwen/Qwen1.5-7B": _LONG,
    "Qwen/Qwen3-0.6B": _LONG,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {**QWEN3_NEXT, "max_position_embeddings": 32768},
}
_TOKENIZER: Final = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "t0",
    "bos_token": "t1",
    "eos_token": "t2",
    "pad_token": "t3",
}


class EncoderBudget:
    """The budget of an encoder of images, as vLLM's MultiModalBudget computes it."""

    def __init__(self, vllm_config: Any, _: object) -> None:
        self.mm_max_toks_per_item = {"image": _IMAGE_TOKENS}
        self.encoder_compute_budget, self.encoder_cache_size = compute_mm_encoder_budget(
            vllm_config.scheduler_config, self.mm_max_toks_per_item
        )


def write_models(folder: Path) -> None:
    """Writes a folder for each model."""
    for name, config in MODELS.items():
        model = folder / name
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(config))
        (model / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER))
        _tokenizer(config["vocab_size"]).save(str(model / "tokenizer.json"))


def _tokenizer(num_tokens: int) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(num_tokens)}, unk_token=_TOKENIZER["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer
