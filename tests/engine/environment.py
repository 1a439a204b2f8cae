"""The environment of processes that tests of engines start."""

from collections.abc import Mapping
from typing import Final

VLLM_ENVIRONMENT: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # so that sums are in the same order on every machine
    "TORCHDYNAMO_DISABLE": "1",  # with enforce_eager it compiles the ranks of log-probabilities only, for seconds
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM needs to run on a CPU, with no network."""
ENGINE_ENVIRONMENT: Final[Mapping[str, str]] = {
    **VLLM_ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""What an engine needs that runs within the process of its caller."""
