"""Settings that all ways to prune share, and what each of them adds."""

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from rayembed.compression.contract import CalibrationText, Compressed, Compression, Source
from rayembed.config.compression import Structure

if TYPE_CHECKING:
    from rayembed.compression.matrices import Matrix
    from rayembed.models.transformer_model import TransformerModel


def share_of(number: int, sparsity: float) -> int:
    """So many's share, rounded down, of the decimal number that the setting is written as: 29 of
    100 at 0.29, which as a float is a little less.
    """
    return int(number * Decimal(str(sparsity)))


class Pruning(Compression):
    """Sets the least important weights of linear layers and experts to zero."""

    structure: Structure = "unstructured"
    """Where zeros may stand. `unstructured`: anywhere in a matrix. `2:4`, `4:8`: half of each group
    of 4 or 8 neighbours along a matrix's inputs, as some GPUs multiply them."""
    sparsity: float = Field(default=0.5, gt=0, lt=1)
    """Share of zeros in each matrix; 0.5 for 2:4 and 4:8, which have no other."""
    skip: tuple[str, ...] | None = None
    """Patterns of names of parameters that are left alone, such as `*.attention.*`; null: all that
    stands outside of the transformers' layers, heads and poolings included, as in NV-Embed (arXiv
    2405.17428, A). Routers of experts, embeddings, norms and biases are never pruned."""

    is_exact: ClassVar[bool] = True
    """Whether it makes no more zeros than `zeros_asked`."""

    @model_validator(mode="after")
    def _check_sparsity(self) -> Self:
        if self.structure != "unstructured" and self.sparsity != 0.5:
            raise ValueError(
                f"structure = {self.structure!r} has half of its weights zero, but sparsity = "
                f"{self.sparsity}; leave sparsity at 0.5, or set structure=unstructured"
            )
        return self

    @property
    def label(self) -> str:
        """Kind and structure, such as `magnitude-2of4`; a sparsity other than half behind it."""
        share = "" if self.sparsity == 0.5 else f"-{self.sparsity:g}"
        return f"{self.kind}-{self.structure.replace(':', 'of')}{share}"

    def check(self, folder: Path) -> None:
        """Check that groups fill the rows of the model's matrices."""
        from rayembed.compression.prune import check_prunable

        check_prunable(self, folder)

    def compress(self, source: Source, output: Path) -> Compressed:
        """Write the pruned model, with its zeros counted in what was written."""
        from rayembed.compression.prune import prune

        return prune(self, source, output)

    def zero(
        self,
        model: "TransformerModel",
        matrices: "Sequence[Matrix]",
        texts: Sequence[CalibrationText],
    ) -> None:
        """Prune the matrices of a model in place.

        Raises:
            ConfigError: too few calibration texts.
        """
        raise TypeError(f"{type(self).__name__} prunes nothing")

    def zeros_asked(self, num_outputs: int, num_inputs: int) -> int:
        """Minimum zeros of a matrix (F, H)."""
        return share_of(num_outputs * num_inputs, self.sparsity)
