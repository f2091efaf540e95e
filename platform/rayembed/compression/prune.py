"""Pruning of a model in a folder: load, solve, write, look at what was written."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rayembed.compression.calibrated import Calibrated
from rayembed.compression.calibration import check_layers, check_texts
from rayembed.compression.contract import Compressed, Source
from rayembed.compression.matrices import Matrix, matrices_of, shares
from rayembed.compression.structures import GROUPS, broken_groups
from rayembed.errors import ArtifactError, ConfigError
from rayembed.hardware import default_device, warn_of_saved
from rayembed.models.architecture import architecture_of
from rayembed.models.build import check_buildable, shapes_of
from rayembed.models.compressed import read_compression, write_compression
from rayembed.models.contract import settings_of
from rayembed.models.export import check_target, new_folder
from rayembed.models.load import check_loadable, load_model, saved_dtype
from rayembed.models.saved_folder import SETTINGS_FILE, part_folders
from rayembed.models.saved_prompts import saved_instructions
from rayembed.models.transformer_model import TransformerModel

if TYPE_CHECKING:
    from rayembed.compression.pruning import Pruning
    from rayembed.compression.quantised import Quantised

logger = logging.getLogger(__name__)


def check_prunable(way: "Pruning", folder: Path) -> None:
    """Check by a model's files that its matrices can have the zeros that are asked for.

    Raises:
        ArtifactError: no model that can be loaded.
        ConfigError: a matrix of another width, or none at all.
    """
    model = empty_model(folder)
    check_structure(way, matrices_of(model, way.skip))
    if isinstance(way, Calibrated):
        check_layers(way.kind, model)


def prune(way: "Pruning", source: Source, output: Path) -> Compressed:
    """Write the pruned model into the folder `output`; raises as `Compression.compress`."""
    check_target(output)
    if isinstance(way, Calibrated):
        check_texts(way.kind, source.texts, way.minimum_texts)
    model = loaded_as_saved(way, source.folder)
    chosen = matrices_of(model, way.skip)
    check_structure(way, chosen)
    before = _zeros(chosen)
    with torch.no_grad():
        way.zero(model, chosen, source.texts)
    model.to("cpu")
    told = counted(model, chosen, tuple(matrix.name for matrix in chosen))
    with new_folder(output) as written:
        save_like(model, source.folder, written)
        check_zeros(way, written, told.matrices, before)
        write_told(way, told, source.folder, written)
    return told


def loaded_as_saved(way: "Pruning | Quantised", folder: Path) -> TransformerModel:
    """The model of a folder in the type in which it will be saved again, on a GPU where there is
    one. Calibration that will be slow in that type is warned of.
    """
    device, saved = default_device(), saved_dtype(folder)
    if isinstance(way, Calibrated):
        warn_of_saved(saved, device, f"calibration of {way.kind}")
    return load_model(folder, dtype=saved, device=device)


def counted(
    model: TransformerModel, chosen: Sequence[Matrix], pruned: tuple[str, ...] = ()
) -> Compressed:
    """What is told of a model whose chosen matrices were changed.

    Args:
        pruned: names of those of them that have zeros now.
    """
    by_part = shares(model, chosen)
    return Compressed(
        weights=sum(whole for whole, _ in by_part.values()),
        compressed=sum(changed for _, changed in by_part.values()),
        by_part=by_part,
        matrices=pruned,
    )


def empty_model(folder: Path) -> TransformerModel:
    """The model of a folder without weights, or with them where it is in a publisher's own layout,
    which its loader alone knows.

    Raises:
        ArtifactError: no model that can be loaded.
    """
    config = check_loadable(folder)
    architecture = architecture_of(config)
    if not (folder / SETTINGS_FILE).is_file():
        if architecture.takes_any_encoder:
            return check_buildable(config, dict.fromkeys(config.parts, folder))
        return load_model(folder, dtype=saved_dtype(folder))
    folders = part_folders(config, folder)
    parts = {name: architecture.empty_part(config, name, at) for name, at in folders.items()}
    tokenizer = architecture.tokenizer(config, folders)
    with torch.device("meta"):
        head = architecture.build_head(config, shapes_of(parts))
        return architecture.assemble(config, parts, head, tokenizer)


def check_structure(way: "Pruning", chosen: Sequence[Matrix]) -> None:
    """Check that groups fill the rows of all matrices, and that something is pruned.

    Raises:
        ConfigError: one is as wide as no number of groups; or no matrix would lose a weight.
    """
    shapes = [weight.shape for matrix in chosen for weight in matrix.slices]
    if not any(way.zeros_asked(*shape) for shape in shapes):
        largest = max(shapes, key=math.prod)
        raise ConfigError(
            f"sparsity = {way.sparsity} takes no weight of any matrix of this model, of which the "
            f"largest has the shape {tuple(largest)}; raise it"
        )
    group = GROUPS.get(way.structure)
    if group is None:
        return
    for matrix in chosen:
        if matrix.width % group.size:
            raise ConfigError(
                f"structure = {way.structure!r} takes groups of {group.size} neighbours, but "
                f"{matrix.name} has {matrix.width} inputs, which {group.size} does not divide; "
                f"take another structure, or leave it alone by skip"
            )


def check_zeros(
    way: "Pruning", folder: Path, names: Sequence[str], before: Mapping[str, int]
) -> None:
    """Count the zeros of a written model, as it is read back.

    Args:
        names: of the pruned matrices.
        before: zeros that their slices had before.

    Raises:
        ArtifactError: there are fewer than asked for, they stand elsewhere, or an exact way made
            more.
    """
    model = load_model(folder, dtype=saved_dtype(folder))
    found = {matrix.name: matrix for matrix in matrices_of(model, way.skip)}
    missing = [name for name in names if name not in found]
    if missing:
        raise ArtifactError(f"the pruned model was not written whole: {missing[0]!r} is missing")
    for name in names:
        matrix = found[name]
        for place, weight in enumerate(matrix.slices):
            told = matrix.told(place)
            _check_slice(way, weight, told, before[told])


def _zeros(matrices: Sequence[Matrix]) -> dict[str, int]:
    """Zeros of each slice, by the name that messages have."""
    return {
        matrix.told(place): int((weight == 0).sum())
        for matrix in matrices
        for place, weight in enumerate(matrix.slices)
    }


def _check_slice(way: "Pruning", weight: torch.Tensor, told: str, before: int) -> None:
    zeros, asked = int((weight == 0).sum()), way.zeros_asked(*weight.shape)
    if zeros < asked or (way.is_exact and zeros - before > asked):
        raise ArtifactError(
            f"{way.label}: {told} was written with {zeros} zeros of {weight.numel()} weights, of "
            f"which it had {before} before; asked for were {asked}; nothing is left of the attempt"
        )
    broken = 0 if way.structure not in GROUPS else broken_groups(weight, way.structure)
    if broken:
        raise ArtifactError(
            f"{way.label}: {told} has {broken} groups that are not {way.structure}; nothing is "
            "left of the attempt"
        )


def save_like(model: TransformerModel, source: Path, folder: Path) -> None:
    """Save a model with the instructions that the folder of its source holds."""
    model.save(folder, instructions=saved_instructions(source, model.config))


def write_told(way: Any, told: Compressed, source: Path, folder: Path) -> None:
    """Write into a model's folder what was done to it, and what to its source before (`before`).

    Of a model that was pruned before, its pruned matrices are told too.
    """
    before = read_compression(source)
    earlier = () if before is None or not told.matrices else before.get("matrices", ())
    write_compression(
        folder,
        {
            **({} if before is None else {"before": before}),
            "settings": settings_of(way),
            "weights": told.weights,
            "compressed": told.compressed,
            "by_part": told.by_part,
            "matrices": list(dict.fromkeys([*told.matrices, *earlier])),
        },
    )
