"""Base class of the pruning methods: prune a model in a folder and count the written zeros.

A matrix is (F, H), F outputs and H inputs; groups of N:M are M neighbours along the inputs.
"""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rayembed.errors import ArtifactError, ConfigError
from rayembed_extras.compression.contract import (
    CalibrationText,
    Compressed,
    Compression,
    CompressionSource,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rayembed.models.transformer_model import TransformerModel
    from rayembed_extras.compression.matrices import Matrix

Structure = Literal["unstructured", "2:4", "4:8"]
"""Allowed positions of zeros: anywhere in a matrix, or a number of them in each group of 4 or 8
neighbours in a row, as some GPUs multiply them."""


class Group(NamedTuple):
    """Size of a group of neighbouring weights, and how many of them must be zero."""

    zeros: int
    size: int


GROUPS: dict[Structure, Group] = {"2:4": Group(2, 4), "4:8": Group(4, 8)}


def share_of(number: int, sparsity: float) -> int:
    """floor(number · sparsity), computed in decimal so that 100 · 0.29 gives 29."""
    return int(number * Decimal(str(sparsity)))


class Pruning(Compression):
    """Sets the least important weights of linear layers and experts to zero."""

    structure: Structure = "unstructured"
    """Allowed positions of zeros. `unstructured`: anywhere in a matrix. `2:4`, `4:8`: half of each
    group of 4 or 8 neighbours along a matrix's inputs, as some GPUs multiply them."""
    sparsity: float = Field(default=0.5, gt=0, lt=1)
    """Share of zeros in each matrix; 0.5 for 2:4 and 4:8, which allow nothing else."""
    skip: tuple[str, ...] | None = None
    """Patterns of names of parameters that are left alone, such as `*.attention.*`; null: all
    outside of the transformers' layers, including heads and poolings, as in NV-Embed (arXiv
    2405.17428, A). Routers of experts, embeddings, norms and biases are never pruned."""

    is_exact: ClassVar[bool] = True
    """Whether it makes no more zeros than `requested_zeros`."""

    @model_validator(mode="after")
    def _check_sparsity(self) -> Self:
        if self.structure != "unstructured" and self.sparsity != 0.5:
            raise ValueError(
                f"structure = {self.structure!r} sets half of the weights to zero, but sparsity = "
                f"{self.sparsity}; leave sparsity at 0.5, or set structure=unstructured"
            )
        return self

    @property
    def label(self) -> str:
        """Method and structure, such as `magnitude-2of4`, and the sparsity if it is not one
        half.
        """
        share = "" if self.sparsity == 0.5 else f"-{self.sparsity:g}"
        return f"{self.kind}-{self.structure.replace(':', 'of')}{share}"

    def check(self, folder: Path) -> None:
        """Check that the rows of the model's matrices consist of whole groups."""
        from rayembed.models.loading.load import empty_model
        from rayembed_extras.compression.calibration import check_layers
        from rayembed_extras.compression.matrices import matrices_of

        model = empty_model(folder)
        _check_structure(self, matrices_of(model, self.skip))
        check_layers(self, model)

    def compress(self, source: CompressionSource, output: Path) -> Compressed:
        """Write the pruned model and count the zeros in the written files."""
        import torch

        from rayembed.models.loading.saved_prompts import saved_instructions
        from rayembed.models.saving.export import check_target, new_folder
        from rayembed_extras.compression.calibration import check_texts, loaded_as_saved
        from rayembed_extras.compression.matrices import matrices_of, statistics_of

        check_target(output)
        check_texts(self, source.texts)
        model = loaded_as_saved(self, source.folder)
        chosen = matrices_of(model, self.skip)
        _check_structure(self, chosen)
        before = _zeros(chosen)
        with torch.no_grad():
            self.zero(model, chosen, source.texts)
        model.to("cpu")
        made = statistics_of(model, chosen, pruned=True)
        with new_folder(output) as written:
            model.save(written, instructions=saved_instructions(source.folder, model.config))
            _check_zeros(self, written, made.matrices, before)
            made.write(self, source.folder, written)
        return made

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
        raise TypeError(f"{type(self).__name__} does not implement zero")

    def requested_zeros(self, num_outputs: int, num_inputs: int) -> int:
        """Minimum number of zeros in a matrix (F, H)."""
        return share_of(num_outputs * num_inputs, self.sparsity)


def smallest_mask(scores: "Tensor", number: int) -> "Tensor":
    """Mark the `number` smallest scores of each row as True, the first ones among equals.

    torch.topk, which llm-compressor takes for groups, leaves it to the machine which of equal
    scores it takes.
    """
    import torch

    order = torch.sort(scores, dim=-1, stable=True).indices
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter_(-1, order[..., :number], True)


def group_mask(scores: "Tensor", structure: Structure) -> "Tensor":
    """(F, H) bool, true at the smallest scores of each N:M group; ties as in `smallest_mask`."""
    group = GROUPS[structure]
    grouped = scores.reshape(len(scores), -1, group.size)
    return smallest_mask(grouped, group.zeros).view_as(scores)


def broken_groups(weight: "Tensor", structure: Structure) -> int:
    """Count the groups with fewer zeros than the structure requires."""
    group = GROUPS[structure]
    zeros = (weight == 0).reshape(len(weight), -1, group.size).sum(dim=-1)
    return int((zeros < group.zeros).sum())


def _check_structure(way: Pruning, chosen: "Sequence[Matrix]") -> None:
    """Raise if a matrix row does not consist of whole groups, or if no weight would be
    pruned.

    Raises:
        ConfigError: one is as wide as no number of groups; or no matrix would lose a weight.
    """
    shapes = [weight.shape for matrix in chosen for weight in matrix.slices]
    if not any(way.requested_zeros(*shape) for shape in shapes):
        largest = max(shapes, key=math.prod)
        raise ConfigError(
            f"sparsity = {way.sparsity} prunes no weight of this model, whose largest matrix has "
            f"the shape {tuple(largest)}; raise sparsity"
        )
    group = GROUPS.get(way.structure)
    if group is None:
        return
    for matrix in chosen:
        if matrix.width % group.size:
            raise ConfigError(
                f"structure = {way.structure!r} needs groups of {group.size} neighbouring inputs, "
                f"but {matrix.name} has {matrix.width} inputs, which {group.size} does not "
                "divide; use another structure, or exclude this matrix by skip"
            )


def _check_zeros(
    way: Pruning, folder: Path, names: Sequence[str], before: Mapping[str, int]
) -> None:
    """Count the zeros of a written model after reading it back.

    Args:
        names: of the pruned matrices.
        before: zeros that their slices had before.

    Raises:
        ArtifactError: there are fewer than asked for, they stand elsewhere, or an exact way made
            more.
    """
    from rayembed.models.loading.load import load_model, saved_dtype
    from rayembed_extras.compression.matrices import matrices_of

    model = load_model(folder, dtype=saved_dtype(folder))
    found = {matrix.name: matrix for matrix in matrices_of(model, way.skip)}
    missing = [name for name in names if name not in found]
    if missing:
        raise ArtifactError(
            f"the pruned model is incomplete: its folder lacks the matrix {missing[0]!r}"
        )
    for name in names:
        matrix = found[name]
        for place, weight in enumerate(matrix.slices):
            where = matrix.slice_name(place)
            _check_slice(way, weight, where, before[where])


def _zeros(matrices: "Sequence[Matrix]") -> dict[str, int]:
    """Count the zeros of each matrix, keyed by the name that error messages use."""
    return {
        matrix.slice_name(place): int((weight == 0).sum())
        for matrix in matrices
        for place, weight in enumerate(matrix.slices)
    }


def _check_slice(way: Pruning, weight: "Tensor", where: str, before: int) -> None:
    zeros, asked = int((weight == 0).sum()), way.requested_zeros(*weight.shape)
    if zeros < asked or (way.is_exact and zeros - before > asked):
        raise ArtifactError(
            f"{way.label}: {where} was written with {zeros} zeros among {weight.numel()} weights "
            f"({before} zeros before pruning), but {asked} were requested; the output was removed"
        )
    broken = 0 if way.structure not in GROUPS else broken_groups(weight, way.structure)
    if broken:
        raise ArtifactError(
            f"{way.label}: {where} has {broken} groups of weights that break the structure "
            f"{way.structure}; the output was removed"
        )
