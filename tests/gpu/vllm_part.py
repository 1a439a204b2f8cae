"""Writes the part of vLLM that runs without its kernels: python tests/gpu/vllm_part.py WHEEL PART.zip.

A wheel of vLLM is larger than what can be carried to every machine. Most of it is code for GPUs, for which there are
kernels in Triton and torch, too. The library that registers vLLM's operators is kept without its kernels, as modules
ask at import which operators there are. It is built against torch's stable interface, so that it loads in several
versions of torch. Flash attention is only named: another backend has to be chosen.
"""

import struct
import sys
import zipfile

_LIBRARY = "vllm/_C_stable_libtorch.abi3.so"
_FLASH_ATTENTION = "vllm/vllm_flash_attn/__init__.py"
_FLASH_ATTENTION_NAMES = "compile_flash_attn_varlen_func_from_specs = flash_attn_varlen_func = get_scheduler_metadata"
_CONTAINER_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")
"""What a container of GPU code begins with: magic number, version, size of this header, size of the code."""


def without_kernels(library: bytes) -> bytes:
    """Zeroes the GPU code in a library, which then compresses to nothing."""
    stripped = bytearray(library)
    start = stripped.find(_CONTAINER_MAGIC)
    while start >= 0:
        _, _, header_bytes, code_bytes = _CONTAINER.unpack_from(stripped, start)
        code = start + header_bytes
        stripped[code : code + code_bytes] = bytes(code_bytes)
        start = stripped.find(_CONTAINER_MAGIC, code + code_bytes)
    return bytes(stripped)


def main(wheel: str, part: str) -> None:
    """Writes Python, metadata, and the library of operators."""
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(part, "w", zipfile.ZIP_LZMA) as kept:
        for name in whole.namelist():
            if name == _FLASH_ATTENTION:
                kept.writestr(name, f"{_FLASH_ATTENTION_NAMES} = None\n")
            elif name == _LIBRARY:
                kept.writestr(name, without_kernels(whole.read(name)))
            elif name.endswith(".py") or ".dist-info/" in name:
                kept.writestr(name, whole.read(name))


if __name__ == "__main__":
    main(*sys.argv[1:])
