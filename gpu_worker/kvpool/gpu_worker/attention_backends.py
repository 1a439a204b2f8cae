"""Metadata builders of common attention backends. The kernels are not part of this package.

To add a backend, provide a name, a layout and a builder: see docs/reference/tensors.md.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import MambaSpec
from kvpool.gpu_worker.attention_metadata import AttentionMetadataBuilder, BuilderContext, CommonAttentionMetadata
from kvpool.gpu_worker.group_table import Integers, MambaStateIndices
from kvpool.gpu_worker.workspace import StagedArray

FLASHINFER_WORKSPACE_BYTES: Final = 128 * 2**20
"""Size that the documentation of FlashInfer recommends for split-k."""


@dataclass(frozen=True, slots=True)
class PagedAttentionBackend:
    """Kernels that read block tables and lengths directly: FlashAttention, Triton, FlexAttention, MLA.

    Their metadata is `CommonAttentionMetadata`.
    """

    name: str = "flash_attn"
    layout: str = "flash_attn"

    def make_builder(self, context: BuilderContext) -> AttentionMetadataBuilder:
        """See `AttentionBackend`."""
        _check_kind(self.name, context, AttentionSpec)
        return _CommonBuilder()


class _CommonBuilder:
    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """Inputs of FlashInfer's paged wrappers. Request i has the pages indices[indptr[i] : indptr[i + 1]].

    Attributes:
        common: Metadata of the step.
        qo_indptr_cpu: (num_reqs + 1,) int32 on the host, offset of each request's tokens.
        paged_kv_indptr_cpu: (num_reqs + 1,) int32 on the host, offset of each request's pages.
        paged_kv_indptr: Copy on the device.
        paged_kv_indices: (num_pages,) int32, page indices.
        paged_kv_last_page_len_cpu: (num_reqs,) int32 on the host, tokens in each request's last page, [1, block_size].
        paged_kv_last_page_len: Copy on the device.
        workspace: uint8 (128 MiB,), scratch memory of the device.
    """

    common: CommonAttentionMetadata
    qo_indptr_cpu: Integers
    paged_kv_indptr_cpu: Integers
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len_cpu: Integers
    paged_kv_last_page_len: torch.Tensor
    workspace: torch.Tensor


@dataclass(frozen=True, slots=True)
class FlashInferBackend:
    """FlashInfer's paged attention."""

    name: str = "flashinfer"
    layout: str = "flashinfer_nhd"

    def make_builder(self, context: BuilderContext) -> AttentionMetadataBuilder:
        """See `AttentionBackend`."""
        _check_kind(self.name, context, AttentionSpec)
        return FlashInferBuilder(context)


class FlashInferBuilder:
    """Converts block tables to ragged page tables."""

    def __init__(self, context: BuilderContext) -> None:
        rows, device = context.max_num_reqs, context.workspace.device
        self._workspace = context.workspace
        self._workspace.get(FLASHINFER_WORKSPACE_BYTES)
        self._lengths = StagedArray((2, rows + 1), torch.int32, device)
        self._indices = StagedArray((rows * context.max_blocks_per_req,), torch.int32, device)

    def build(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        """See `AttentionMetadataBuilder`."""
        seq_lens = common.seq_lens_cpu if common.dcp_local_seq_lens_cpu is None else common.dcp_local_seq_lens_cpu
        num_pages = -(-seq_lens // common.block_size)
        indptr = np.zeros(common.num_reqs + 1, np.int32)
        np.cumsum(num_pages, out=indptr[1:])
        # A request without tokens on this rank has 0 pages and last_page_len block_size: 0 tokens in total.
        last_page_len = (seq_lens - 1) % common.block_size + 1
        table = common.block_table_cpu
        used = np.arange(table.shape[1]) < num_pages[:, None]
        self._lengths.wait()
        self._indices.wait()
        self._lengths.host[0, : common.num_reqs + 1] = indptr
        self._lengths.host[1, : common.num_reqs] = last_page_len
        self._indices.host[: indptr[-1]] = table[used]
        lengths = self._lengths.copy(0, 2)
        indices = self._indices.copy(0, int(indptr[-1]))
        return FlashInferMetadata(
            common=common,
            qo_indptr_cpu=common.query_start_loc_cpu,
            paged_kv_indptr_cpu=indptr,
            paged_kv_indptr=lengths[0, : common.num_reqs + 1],
            paged_kv_indices=indices,
            paged_kv_last_page_len_cpu=last_page_len,
            paged_kv_last_page_len=lengths[1, : common.num_reqs],
            workspace=self._workspace.get(FLASHINFER_WORKSPACE_BYTES),
        )


@dataclass(frozen=True, slots=True)
class MambaMetadata:
    """Metadata of state space kernels.

    Attributes:
        query_start_loc: (num_reqs + 1,) int32, offset of each request's tokens.
        max_query_len: Maximum number of tokens of one request.
        states: States that are read and written.
    """

    query_start_loc: torch.Tensor
    max_query_len: int
    states: MambaStateIndices


@dataclass(frozen=True, slots=True)
class MambaBackend:
    """State space kernels: convolution and scan. The name can be chosen."""

    name: str = "mamba"
    layout: str = "mamba"

    def make_builder(self, context: BuilderContext) -> AttentionMetadataBuilder:
        """See `AttentionBackend`."""
        _check_kind(self.name, context, MambaSpec)
        return _MambaBuilder()


class _MambaBuilder:
    def build(self, common: CommonAttentionMetadata) -> MambaMetadata:
        if common.state_indices is None:
            raise InvalidArgumentError("state_indices", "missing for a group of states")
        return MambaMetadata(common.query_start_loc, common.max_query_len, common.state_indices)


def _check_kind(backend: str, context: BuilderContext, supported: type[KVCacheSpec]) -> None:
    if not isinstance(context.spec, supported):
        layer, kind = context.layer_names[0], type(context.spec).__name__
        raise InvalidArgumentError("backends", f"layer {layer!r}: {backend!r} does not support a {kind}")
