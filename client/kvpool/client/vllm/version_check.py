"""Refuses versions of vLLM that the adapter does not know: before the model is loaded, and when an engine attaches."""

from kvpool.client.vllm.missing_methods import missing_methods
from kvpool.client.vllm.pool_config import UnsupportedError
from kvpool.client.vllm.settings import Settings
from kvpool.client.vllm.versions import SUPPORTED_VERSIONS, VERSION


def check_version(settings: Settings) -> None:
    """Raises UnsupportedError if the scheduler of the installed vLLM may use blocks by other rules."""
    if not VERSION.startswith(SUPPORTED_VERSIONS) and settings.untested_version != VERSION:
        supported = f"{', '.join(SUPPORTED_VERSIONS[:-1])} or {SUPPORTED_VERSIONS[-1]}"
        raise UnsupportedError(
            "this version", f"use {supported}; untested_version={VERSION!r} runs it at your own risk"
        )
    for problem in missing_methods():
        raise UnsupportedError("this version", problem)
