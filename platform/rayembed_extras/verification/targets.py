"""Verify a server, folder, file or object against a model's proof (its stored reference vectors):
open it, measure, diagnose.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayembed.api.calls import check_addresses, reference_of
from rayembed.errors import ConfigError
from rayembed.proof.proof import Mistake, NumberType, Proof, read_proof
from rayembed.registry.registered_model import SCHEME, find_folder
from rayembed_extras.verification.advice import advice_for
from rayembed_extras.verification.cuts import cutting, narrowed, not_cut
from rayembed_extras.verification.diagnose import Diagnosis, diagnose
from rayembed_extras.verification.loaded import open_folder, open_gguf, open_object, open_onnx
from rayembed_extras.verification.measure import Target, measure

_HTTP = ("http://", "https://")


def verify_target(
    target: Any,
    proof: Proof | str | Path | None,
    *,
    prompts: str | None = None,
    repeat: int = 2,
    within: NumberType = "bfloat16",
    dimensions: int | None = None,
    tracking_uri: str | None = None,
    **server: Any,
) -> Diagnosis:
    """Compare the vectors of a target with a model's proof (reference vectors); see
    `verify`.

    Args:
        tracking_uri: MLflow's address for registered versions; None: `MLFLOW_TRACKING_URI`.
    """
    if prompts not in (None, "client", "server"):
        raise ConfigError(f"prompts = {prompts!r}; allowed: 'client', 'server'")
    if repeat < 1:
        raise ConfigError(f"repeat = {repeat!r} must be a whole number, 1 or more")
    if isinstance(target, Path):
        target = str(target)
    if isinstance(proof, Proof):
        given = proof
    else:
        own = isinstance(target, str) and not _is_address(target) and not _is_file(target)
        named: str | Path | None = target if own and proof is None else proof
        if named is None:
            raise ConfigError(
                f"no proof to compare {target!r} with; name the model that it should be (--proof): "
                "a folder, models:/name@alias, or a hub reference"
            )
        given = proof_of(named, tracking_uri, make=proof is not None)
    if dimensions is not None:
        trained, given = given.dimensions, narrowed(given, dimensions)
        if _is_address(target):
            server["dimensions"] = dimensions
    opened = open_target(target, given, prompts=prompts, tracking_uri=tracking_uri, **server)
    uncut: set[int] = set()
    if dimensions is not None:
        opened, uncut = cutting(opened, dimensions)
    found = diagnose(given, opened, measure(opened, given.texts, repeat), within=within)
    if dimensions is None:
        return found
    if uncut:
        made = not_cut(max(uncut), trained[0], dimensions)
        found = _with_mistake(found, made, advice_for(given, [made], opened.software), max(uncut))
    if dimensions in trained:
        return found
    note = f"the model is trained for vectors of {trained} numbers, none of them {dimensions}"
    return replace(found, notes=(*found.notes, note))


def _with_mistake(
    found: Diagnosis, made: Mistake, advice: tuple[str, ...], width: int
) -> Diagnosis:
    """Return the diagnosis of vectors that were cut here, with the mistake that they were not cut
    before, and their width.
    """
    also = "cut, they are the same vectors" if found.same else f"also: {found.line}"
    return replace(
        found,
        same=False,
        line=f"{made.what}; {also}",
        mistakes=(made.name, *found.mistakes),
        advice=(*advice, *found.advice),
        figures={**(found.figures or {}), "dimensions": width},
    )


def open_target(
    target: Any,
    proof: Proof,
    *,
    prompts: str | None = None,
    tracking_uri: str | None = None,
    **server: Any,
) -> Target:
    """Open a server, folder, GGUF or ONNX file, registered version or object as a verification
    target.

    Raises:
        RayembedError: as the openers of `servers` and `loaded`.
    """
    if not isinstance(target, str):
        return open_object(target, prompts=prompts)
    check_addresses(target=target)
    if _is_address(target):
        from rayembed_extras.verification.servers import open_server

        return open_server(target, prompts=prompts, **server)
    if given := sorted(name for name, value in server.items() if value is not None):
        raise ConfigError(
            f"{', '.join(given)} applies only to the address of a server (http://…), but "
            f"{target!r} is not one"
        )
    if _is_file(target):
        from rayembed.assets.resolver import resolve

        opener = open_gguf if _is_file(target, ".gguf") else open_onnx
        return opener(resolve(target), lengths=proof.lengths, prompts=prompts)
    if (file := _onnx_file_in(Path(target))) is not None:
        return open_onnx(file, lengths=proof.lengths, prompts=prompts)
    return open_folder(_folder(target, tracking_uri), prompts=prompts)


def proof_of(model: str | Path, tracking_uri: str | None = None, *, make: bool = True) -> Proof:
    """Read the proof (stored reference vectors) of a model.

    Args:
        make: load a model without a proof, and make it in memory.

    Raises:
        RayembedError: there is no such model or no proof, or it is damaged.
    """
    folder = _folder(str(model), tracking_uri)
    if (known := read_proof(folder)) is not None:
        return known
    if not make:
        raise ConfigError(
            f"{str(model)!r} has no proof (reference vectors) of its own; name the model that it "
            "is a copy of (--proof)"
        )
    from rayembed.models.loading.files import weights_fingerprint
    from rayembed.models.loading.load import load_model
    from rayembed.models.loading.saved_prompts import saved_instructions
    from rayembed.proof.write import normalises, prove

    loaded = load_model(folder, dtype="float32")
    instructions = saved_instructions(folder, loaded.config)
    made = prove(loaded, instructions, normalised=normalises(folder))
    return replace(made, weights=weights_fingerprint(folder))


def _folder(model: str, tracking_uri: str | None) -> Path:
    reference = reference_of(model)
    uri = tracking_uri
    if reference.startswith(SCHEME) and uri is None:
        from rayembed.registry.tracking_uri import resolve_tracking_uri

        storage = str(Path("outputs").absolute())
        uri = resolve_tracking_uri(
            os.environ.get("MLFLOW_TRACKING_URI"), storage, make_folder=False
        )
    return find_folder(reference, uri)


def _is_address(target: Any) -> bool:
    return isinstance(target, str) and target.startswith(_HTTP)


def _is_file(target: str, *endings: str) -> bool:
    """Whether a target is a file by its ending; a hub reference may have its revision behind it."""
    names = [target, target.partition("@")[0] if target.startswith("hf://") else target]
    return any(name.lower().endswith(endings or (".gguf", ".onnx")) for name in names)


def _onnx_file_in(folder: Path) -> Path | None:
    """Return the only ONNX file of a folder that has no other weights; None if it is otherwise."""
    weights = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    files = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")])
    return files[0] if len(files) == 1 and not weights else None
