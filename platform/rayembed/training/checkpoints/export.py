"""Export a stage's model to a folder in storage, with a record of its inputs."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayembed.assets.atomic import room_for
from rayembed.assets.folder_formats import PROOF_FOLDER
from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import (
    exists,
    is_remote,
    join,
    read_bytes,
    remove_file,
    remove_folder,
    upload_folder,
    write_atomic,
)
from rayembed.config.run import Run
from rayembed.models.kept_zeros import carry_compression
from rayembed.proof.proof import has_proof
from rayembed.proof.write import add_proof
from rayembed.training.checkpoints.weights import load_weights, weights_digest

MADE_OF_FILE = "made-of.json"
"""Record of an exported model's inputs; written last, so that a partial export has none."""


def export(run: Run, weights: str | None, folder: str) -> None:
    """Export the model with the given weights (None: untrained weights) to a folder in
    storage.

    One that is there whole, of the same run, weights and instructions, stays; another is replaced.

    Raises:
        RayembedError: the backbone or the weights cannot be had, or the storage refuses the model.
    """
    instructions = run.instructions
    defaults = run.default_instructions()
    values: dict[str, Any] = {"run": run.fingerprint, "weights": "untrained"}
    values["instructions"] = instructions
    if defaults:
        values["default_instructions"] = defaults
    if weights is not None:
        values["weights"] = weights_digest(weights)
    made_of = json.dumps(values, indent=1, sort_keys=True).encode()

    def save(place: Path) -> None:
        model = load_weights(run, weights)
        model.default_instructions = defaults
        model.save(place, instructions=instructions)
        if run.model.keep_zeros:
            starts = {name: resolve_model(at) for name, at in run.model.parts.items()}
            carry_compression(starts, model, place)

    upload_model(folder, made_of, save, embeds=run.model.embeds)


def complete_model(folder: str) -> None:
    """Write the reference vectors (proof) of a whole model in storage, unless it has them.

    Such a model may come from an earlier version of rayembed, or from a run that was killed between
    model and proof.
    """
    if not is_remote(folder):
        add_proof(Path(folder))
    elif not has_proof(folder):
        with tempfile.TemporaryDirectory(prefix="export-") as scratch:
            place = Path(scratch) / "model"
            with room_for(scratch, "or set TMPDIR to a folder on another disk"):
                shutil.copytree(resolve_model(folder), place)
                add_proof(place)
            if (place / PROOF_FOLDER).is_dir():
                upload_folder(place / PROOF_FOLDER, join(folder, PROOF_FOLDER))


def upload_model(
    folder: str, made_of: bytes, save: Callable[[Path], None], *, embeds: bool = True
) -> None:
    """Let `save` write a model into a local folder, add the model's stored reference vectors, and
    upload the folder to storage.

    One that is there whole, made of the same, stays, and gets the vectors if it lacks them; another
    is replaced.

    Args:
        made_of: content of the note by which a whole model is known.
        save: makes the folder that it is given, or replaces the model in it.
        embeds: whether it gives vectors of texts, and therefore has a proof.

    Raises:
        RayembedError: what `save` raises, or the storage refuses the model.
        StorageFullError: there is no room for it.
    """

    def finish(place: Path) -> None:
        save(place)
        if embeds:
            add_proof(place)

    note = join(folder, MADE_OF_FILE)
    if exists(note):
        if read_bytes(note) == made_of:
            if embeds:
                complete_model(folder)
            return
        remove_file(note)  # before the rest: what is removed or replaced in part is not whole
    if is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="export-") as scratch:
            with room_for(scratch, "or set TMPDIR to a folder on another disk"):
                finish(Path(scratch) / "model")
            remove_folder(folder)
            upload_folder(Path(scratch) / "model", folder)
    else:
        with room_for(folder):
            finish(Path(folder))
    write_atomic(note, made_of)
