"""Writes the part of vLLM that a Hopper GPU needs: python tests/gpu/vllm_part.py WHEEL PART.tar.xz.

A wheel of vLLM is larger than what can be carried to every machine. Most of it is code for other GPUs, kernels for
experts, and flash attention 2. Kept are the Python part and the libraries below, each with code for one kind of GPU.
These libraries use torch's stable interface only, so that they load in several versions of torch.
"""

import io
import struct
import sys
import tarfile
import zipfile

_LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
_CAPABILITY = 90
_CONTAINER_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")
"""What a container of GPU code begins with: magic number, version, size of this header, size of the code."""
_ENTRY = struct.Struct("<HHIQQHHI")
"""What each code in it begins with: kind, version, size of this header, size of the code, sizes that the driver uses,
minor and major version of the format, compute capability."""
_PTX, _MACHINE_CODE = 1, 2


def for_one_gpu(library: bytes) -> bytes:
    """Keeps machine code for one compute capability, or PTX where there is none; zeroes follow."""
    kept = bytearray(library)
    start = library.find(_CONTAINER_MAGIC)
    while start >= 0:
        magic, version, header_bytes, code_bytes = _CONTAINER.unpack_from(library, start)
        begin, end = start + header_bytes, start + header_bytes + code_bytes
        codes: dict[tuple[int, int], bytes] = {}
        at = begin
        while at < end:
            kind, _, entry_bytes, size, *_, capability = _ENTRY.unpack_from(library, at)
            key = kind, capability if kind == _MACHINE_CODE else 0
            codes[key] = codes.get(key, b"") + library[at : (at := at + entry_bytes + size)]
        code = codes.get((_MACHINE_CODE, _CAPABILITY), codes.get((_PTX, 0), b""))
        kept[begin:end] = code.ljust(code_bytes, b"\0")
        _CONTAINER.pack_into(kept, start, magic, version, header_bytes, len(code))
        start = library.find(_CONTAINER_MAGIC, end)
    return bytes(kept)


def main(wheel: str, part: str) -> None:
    """Writes Python, metadata, and the libraries."""
    with zipfile.ZipFile(wheel) as whole, tarfile.open(part, "w:xz", preset=1) as kept:
        for name in whole.namelist():
            if name.endswith(".py") or ".dist-info/" in name or name in _LIBRARIES:
                content = whole.read(name)
                content = for_one_gpu(content) if name in _LIBRARIES else content
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                kept.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
