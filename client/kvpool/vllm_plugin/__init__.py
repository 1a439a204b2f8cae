"""vLLM's plugin: an engine uses kvpool if its settings name a server, without flags.

vLLM calls `register` in each of its processes, before an engine's configuration is made. It is an entry point of the
group `vllm.general_plugins`. A package of its own, because an import of `kvpool.client` brings gRPC: engines without
kvpool pay for nothing but this module.
"""

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

_ADDRESS: Final = "KVPOOL_ADDRESS"
_SWITCH: Final = "KVPOOL_VLLM_PLUGIN"
_KEY: Final = "kvpool"
_ARGUMENTS: Final = "vllm.engine.arg_utils"
_MARK: Final = "chooses_kvpool"


def register() -> None:
    """Wraps the method that makes an engine's configuration. More calls change nothing.

    The process that makes the configuration has imported the method's module. Others, such as the workers', do not need
    to import it. A program that calls `load_general_plugins` before it imports vLLM's engine must set KVPOOL_ADDRESS
    before, too.
    """
    module = sys.modules.get(_ARGUMENTS)
    if module is None and os.environ.get(_ADDRESS):
        module = importlib.import_module(_ARGUMENTS)
    if module is not None:
        _wrap(getattr(module, "EngineArgs", None))


def _wrap(arguments_class: Any) -> None:
    create = getattr(arguments_class, "create_engine_config", None)
    if create is None and os.environ.get(_ADDRESS):
        raise RuntimeError(f"this vLLM has no EngineArgs.create_engine_config, so {_ADDRESS} cannot be used")
    if create is None or hasattr(create, _MARK):
        return

    @functools.wraps(create)
    def create_engine_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        if not _names_server(getattr(arguments, "additional_config", None)):
            return create(arguments, *args, **kwargs)
        from kvpool.client.vllm import activation  # noqa: PLC0415 - imports gRPC

        activation.choose_classes(arguments)
        config = create(arguments, *args, **kwargs)
        activation.log_use(config)
        return config

    setattr(create_engine_config, _MARK, True)
    arguments_class.create_engine_config = create_engine_config


def _names_server(additional_config: object) -> bool:
    """Returns whether an engine with this configuration uses kvpool.

    Raises:
        ValueError: The switch has another value than 0 or 1.
    """
    switch = os.environ.get(_SWITCH) or "1"
    if switch not in ("0", "1"):
        raise ValueError(f"{_SWITCH} must be 0 or 1, not {switch!r}")
    is_configured = isinstance(additional_config, Mapping) and _KEY in additional_config
    return switch == "1" and (is_configured or bool(os.environ.get(_ADDRESS)))
