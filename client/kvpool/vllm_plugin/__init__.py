"""vLLM's plugin: an engine uses kvpool if its settings name a server, without flags.

vLLM calls `register` in each of its processes, before an engine's configuration is made. It is an entry point of the
group `vllm.general_plugins`. A package of its own, because an import of `kvpool.client` brings gRPC: engines without
kvpool pay for nothing but this module.
"""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

_ADDRESS: Final = "KVPOOL_ADDRESS"
_SWITCH: Final = "KVPOOL_VLLM_PLUGIN"
_KEY: Final = "kvpool"
_ARGUMENTS: Final = "vllm.engine.arg_utils"
_SCHEDULERS: Final = "kvpool.client.vllm"
_MARK: Final = "chooses_kvpool"


def register() -> None:
    """Wraps the method that makes an engine's configuration. More calls change nothing.

    The process that makes the configuration has imported the method's module. Others, such as the workers', do not need
    to import it. A program that calls `load_general_plugins` before it imports vLLM's engine must set KVPOOL_ADDRESS
    before, too.
    """
    logging.getLogger("vllm.config.scheduler").addFilter(_is_for_users)
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
        uses_kvpool = _names_server(getattr(arguments, "additional_config", None))
        has_variables = any(name.startswith("KVPOOL_") for name in os.environ)
        if os.environ.get(_SWITCH) == "0" or not (uses_kvpool or has_variables):
            return create(arguments, *args, **kwargs)
        from kvpool.client.vllm import activation  # noqa: PLC0415 - imports gRPC

        activation.warn_of_variables(uses_kvpool=uses_kvpool)
        if not uses_kvpool:
            return create(arguments, *args, **kwargs)
        activation.choose_classes(arguments)
        config = create(arguments, *args, **kwargs)
        activation.check_services(config)
        return config

    setattr(create_engine_config, _MARK, True)
    arguments_class.create_engine_config = create_engine_config


def _is_for_users(record: logging.LogRecord) -> bool:
    """Drops vLLM's warning that a scheduler class may have no support and no async scheduling: kvpool's has both."""
    return not (str(record.msg).startswith("Using custom scheduler class") and _SCHEDULERS in str(record.args))


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
