"""Settings that all ways to quantise for GPUs share.

Weights are 8 bits wide with one scale for each output of a layer, inputs are rounded to 8 bits with
one scale for each token when the model runs. The files are in compressed-tensors format, which
transformers, sentence-transformers and vLLM load.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rayembed.compression.contract import CalibrationText, Compressed, Compression, Source
from rayembed.compression.library import check_installed
from rayembed.config.compression import Scheme

if TYPE_CHECKING:
    from rayembed.compression.matrices import Matrix
    from rayembed.compression.quantise import Weights
    from rayembed.models.transformer_model import TransformerModel


class Quantised(Compression):
    """Rounds the weights of linear layers to 8 bits, and their inputs when the model runs."""

    skip: tuple[str, ...] | None = None
    """Patterns of names of parameters that are left alone, such as `*.attention.*`; null: all that
    stands outside of the transformers' layers, heads and poolings included. Routers of experts,
    embeddings, norms and biases are never quantised."""

    scheme: ClassVar[Scheme] = "INT8"
    packages: ClassVar[tuple[str, ...]] = ("compressed_tensors",)
    """What the way needs beyond rayembed's own requirements."""

    def check(self, folder: Path) -> None:
        """Check packages, and that all layers that are quantised can be read by transformers."""
        from rayembed.compression.quantise import check_quantisable

        check_installed(self.kind, *self.packages)
        check_quantisable(self, folder)

    def compress(self, source: Source, output: Path) -> Compressed:
        """Write the quantised model."""
        from rayembed.compression.quantise import quantise

        check_installed(self.kind, *self.packages)
        return quantise(self, source, output)

    def weights(
        self,
        model: "TransformerModel",
        matrices: "Sequence[Matrix]",
        texts: Sequence[CalibrationText],
    ) -> "Weights":
        """Quantised weights by the parameters' names; here each is rounded to the nearest."""
        from rayembed.compression.quantise import nearest_weights

        return nearest_weights(self.scheme, matrices)
