"""The backend of kernels that read block tables as they are. The kernels are not part of this package.

To add a backend, provide a name, a layout and a builder: see docs/reference/tensors.md.
"""

from dataclasses import dataclass

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec
from kvpool.gpu_worker.attention_metadata import BuilderContext, CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class PagedAttentionBackend:
    """Kernels that read block tables and lengths directly: FlashAttention, Triton, FlexAttention, MLA.

    Their metadata is `CommonAttentionMetadata`.
    """

    name: str = "flash_attn"
    layout: str = "flash_attn"

    def make_builder(self, context: BuilderContext) -> "PagedAttentionBackend":
        """See `AttentionBackend`. It builds the metadata itself."""
        if not isinstance(context.spec, AttentionSpec):
            layer, kind = context.layer_names[0], type(context.spec).__name__
            raise InvalidArgumentError("backends", f"layer {layer!r}: {self.name!r} does not support a {kind}")
        return self

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """See `AttentionMetadataBuilder`."""
        return common
