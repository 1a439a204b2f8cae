"""What weights an engine has loaded: its default weights version in shared memory, and the keys of its LoRAs there.

1. A file of weights is identified by its size, time of change, inode and, of safetensors, its header, as it takes too
   long to read; a link into a cache of Hugging Face by the name of the blob, which is a hash of the contents. Other
   files are read.
2. Files may change while an engine loads them. They are identified before and after, and must be the same. A download
   may add blobs meanwhile.
3. Weights that cannot be identified get a version that no other session has.
"""

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

Files = dict[str, str]
"""What identifies each file of weights, by its path in the folder, and how they are loaded."""

_FILE_FORMATS: Final = (
    *("auto", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt"),
    *("runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"),
)
"""Load formats that read the model's files and nothing else."""
_OTHERS: Final = (".json", ".py")
"""Of an index, quantization, scales, code and the like."""
_SUFFIXES: Final = (*_OTHERS, ".bin", ".pt", ".pth", ".safetensors")
_TOKENIZER: Final = ("tokenizer", "vocab")
"""How files are named that change only how texts become tokens."""
_IGNORED: Final = (".", "checkpoint-")
"""How folders are named that no model is loaded from. A training may write checkpoints beside the model."""
_ADAPTER: Final = ("adapter_*",)
"""What vLLM reads of a LoRA, whose folder may have checkpoints of its training, too."""
_LORA_OPTIONS: Final = ("enable_mixed_moe_lora_format", "enable_moe_shared_loras", "lora_dtype", "target_modules")
"""Options on which it depends what of a LoRA is applied, and how."""
_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BLOB: Final = "blob "
_MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the format."""

_log = logging.getLogger("kvpool.client.vllm")


def identify_weights(vllm_config: Any) -> None:
    """Notes in an engine's configuration what it is about to load, for `default_weights_version`."""
    vllm_config.kvpool_weights = _weights(vllm_config)


def default_weights_version(vllm_config: Any) -> str:
    """Returns the version of the weights that an engine has loaded, equal in engines that load the same files.

    It warns of weights that cannot be identified. An engine that was started without the plugin has noted nothing, so
    that files are identified only after they were loaded.
    """
    after = _weights(vllm_config)
    before = getattr(vllm_config, "kvpool_weights", after)
    if isinstance(after, str) or isinstance(before, str):
        error = after if isinstance(after, str) else before
    elif before.items() <= after.items() and all(after[name].startswith(_BLOB) for name in after.keys() - before):
        return _digest(after)
    else:
        error = "files have changed while they were loaded"
    _log.warning("weights not identified", extra={"setting": "weights_version", "error": error})
    return unknown_weights_version()


def unknown_weights_version() -> str:
    """Makes a weights version that no other session has, so that the engine hits only what it computes from now on."""
    return f"unknown-{uuid.uuid4().hex}"


def ordered_text(options: object) -> str:
    """Returns a text of options that does not depend on the order in which they were given."""
    return json.dumps(options, sort_keys=True, default=repr)


def _digest(files: Files) -> str:
    return f"files-{hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:32]}"


def _weights(vllm_config: Any) -> Files | str:
    """Identifies what an engine loads: its model and its draft model. Or says why this is not possible."""
    loads, speculative = [(vllm_config.model_config, vllm_config.load_config)], vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        loads.append((speculative.draft_model_config, speculative.draft_load_config or vllm_config.load_config))
    found: Files = {}
    for i, (model, load) in enumerate(loads):
        if load.load_format == "dummy":
            files: Files | str = {"seed": str(model.seed)}
        elif load.load_format in _FILE_FORMATS and not model.model_weights:
            files = identify_files(model.model, model.revision, load.download_dir)
        else:
            files = f"load_format {load.load_format!r} reads other than local files"
        if isinstance(files, str):
            return files
        options = {f"{i}": f"{load.load_format} {ordered_text(load.model_loader_extra_config)}"}
        found |= options | {f"{i}/{name}": identity for name, identity in files.items()}
    return found


def identify_files(
    name: str, revision: str | None = None, cache: str | None = None, patterns: Sequence[str] = ("*", "*/*")
) -> Files | str:
    """Identifies the files of a folder or, in Hugging Face's cache, of a name. Or says why this is not possible.

    Some models have parts in folders of the folder; none is known with deeper ones.
    """
    try:
        root = Path(name).expanduser()
        root = root if root.exists() else _snapshot(name, revision, cache)
        paths = [str(path.relative_to(root)) for each in patterns for path in root.glob(each) if not path.is_dir()]
        found = {path: _identity(root / path) for path in paths if _is_counted(path)}
    except (OSError, ValueError) as error:
        return str(error)
    return found or f"{root} has no files of weights"


def _snapshot(name: str, revision: str | None, cache: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - tools without vLLM lack them
    from vllm import envs  # noqa: PLC0415 - as above

    if envs.VLLM_USE_MODELSCOPE:
        raise ValueError(f"{name} is a name of ModelScope")
    return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))


def _is_counted(name: str) -> bool:
    """Returns whether what is computed depends on a file. Hidden folders have locks and the like."""
    path = Path(name)
    return path.suffix in _SUFFIXES and not path.name.startswith(_TOKENIZER) and not name.startswith(_IGNORED)


def _identity(path: Path) -> str:
    status, target = path.stat(), path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and _HASH.fullmatch(target.name):
        return f"{_BLOB}{target.name} {status.st_size}"
    if path.suffix in _OTHERS:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    header = b""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {hashlib.sha256(header).hexdigest()}"


class LoRAs:
    """What an engine has loaded as its LoRAs. vLLM loads one again in place on demand, or after it was evicted.

    4. vLLM loads a LoRA when a step needs it. So its files are identified when a request arrives, and again after the
       first step of the request, before other sessions see its blocks.
    """

    def __init__(self, config: Any) -> None:
        """Starts without LoRAs; what is computed with them also depends on vLLM's LoRAConfig."""
        options = {name: getattr(config, name, None) for name in _LORA_OPTIONS}
        options["target_modules"] = sorted(options["target_modules"] or ())
        self._options = {"options": ordered_text(options)}
        # By number: path, files, and a key that no other engine has. No files: it is not known what vLLM has loaded.
        self._loaded: dict[int, tuple[str, Files | str, str]] = {}

    def load(self, lora: Any) -> bool:
        """Records a LoRA that vLLM is about to load. Returns whether it replaces the weights of one that is loaded."""
        before = self._loaded.get(lora.lora_int_id)
        if before and not lora.load_inplace:
            return False
        files = identify_files(lora.lora_path, patterns=_ADAPTER)
        if before and before[1] == files and isinstance(files, dict):
            return False
        if isinstance(files, str):
            _warn_of(lora, files)
        self._loaded[lora.lora_int_id] = lora.lora_path, files, unknown_weights_version()
        return before is not None

    def forget(self, lora: Any) -> None:
        """Marks the weights of a LoRA as unknown. Its requests share no blocks until it is loaded in place."""
        self._loaded[lora.lora_int_id] = lora.lora_path, {}, ""

    def key(self, lora: Any) -> str:
        """Returns what identifies the weights of a LoRA, once `load` has noted it. O(its files).

        vLLM loads one with `load_inplace` at each step: its blocks are known to its own engine only.
        """
        path, files, own = self._loaded[lora.lora_int_id]
        if isinstance(files, dict) and files and self._is_as_noted(lora, path, files):
            return own if lora.load_inplace else _digest(files | self._options)
        return unknown_weights_version()

    def has_changed(self, lora: Any) -> bool:
        """Returns whether a step, whose output is there, may have loaded other weights than `key` has named."""
        path, files, own = self._loaded[lora.lora_int_id]
        if isinstance(files, dict):
            return bool(files) and not self._is_as_noted(lora, path, files)
        # It could not be identified before, such as one that vLLM had to download.
        self._loaded[lora.lora_int_id] = path, identify_files(path, patterns=_ADAPTER), own
        return False

    def _is_as_noted(self, lora: Any, path: str, files: Files) -> bool:
        """Whether a LoRA has the noted files, or none that vLLM could load. If not, it forgets them: rule 2."""
        now = identify_files(lora.lora_path, patterns=_ADAPTER)
        if path == lora.lora_path and (now == files or isinstance(now, str)):
            return True
        _warn_of(lora, "its files have changed")
        self.forget(lora)
        return False


def _warn_of(lora: Any, error: str) -> None:
    _log.warning("LoRA not identified", extra={"path": lora.lora_path, "error": error})
