"""The software that computes teachers and cross-encoders: package or source → its version.

What they gave is found by it, as an evaluation's embeddings are, so that nothing made by other code
or libraries is taken for theirs. Each model counts what computes it alone.
"""

import logging
from collections.abc import Mapping
from typing import Any

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import exists, join
from rayembed.config.graph import RUNTIME_PACKAGES
from rayembed.config.model import architecture_classes
from rayembed.data.parts import remedy
from rayembed.models.code_version import QUANTISED, foreign_modules, packages_of, vectors_software
from rayembed.models.load import is_quantised_folder, settings_of
from rayembed.models.saved_folder import read_graph

log = logging.getLogger(__name__)

_TEACHERS = ("data/vectors/teacher.py",)
"""Modules by which teachers compute, beside the forward pass."""

_CROSS_ENCODERS = ("data/mining/rescoring.py",)
"""Modules by which cross-encoders do."""

_NOT_COUNTED = "not counted"


def teachers_software(reference: str) -> dict[str, str]:
    """The software that embeds with a teacher.

    Raises:
        AssetError, ArtifactError: there is no such model, or nothing that any architecture reads.
    """
    folder = resolve_model(reference)
    config = settings_of(folder)
    packages = packages_of(read_graph(folder), quantised=is_quantised_folder(folder, config))
    return vectors_software(_TEACHERS, packages=packages, modules=foreign_modules([type(config)]))


def cross_encoders_software(reference: str) -> dict[str, str]:
    """The software that scores with a cross-encoder.

    Raises:
        AssetError: there is no such model.
    """
    packed = packages_of(None, quantised=is_quantised_folder(resolve_model(reference)))
    return vectors_software(_CROSS_ENCODERS, packages=["sentence-transformers", *packed])


def software_here() -> dict[str, str]:
    """All software of this machine that any teacher could be computed by."""
    return vectors_software(
        _TEACHERS,
        packages=[QUANTISED, *RUNTIME_PACKAGES.values()],
        modules=foreign_modules(architecture_classes()),
    )


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """What is another: its name, the version then and the one now."""
    both = [(n, then.get(n, _NOT_COUNTED), now.get(n, _NOT_COUNTED)) for n in {**then, **now}]
    return [(name, before, after) for name, before, after in both if before != after]


def note_software(
    record: str, model: str, now: Mapping[str, str], *, unknown: bool = False
) -> None:
    """Write down which software a model is computed by now, and warn where it was another before.

    Args:
        record: path of what is written down.
        model: what it is and its reference, for the warning.
        unknown: whether there are results that no record tells the software of.
    """
    known = exists(record)
    then = read_json(record, remedy(record)).get("packages", {}) if known else {}
    changed = differences(then, now) if known else []
    why = "; ".join(f"{name} {before} is now {after}" for name, before, after in changed)
    if unknown and not known:
        why = "which one was not yet written down then"
    if why:
        log.warning(
            "%s: what it gave was made by other software (%s) and is not taken: it is made anew, "
            "and so is what was made of it",
            *(model, why),
        )
    if changed or not known:
        write_json(record, {"packages": dict(now)})


def note_cross_encoder(context: Any, reference: str, weights: str) -> None:
    """Write down by which software a cross-encoder scores now; warn where it was another before.

    Args:
        weights: fingerprint of its weights.
    """
    record = join(context.storage, "data", "vectors", f"cross-encoder-{weights}.json")
    software = context.teacher_loader.scoring_software(reference)
    note_software(record, f"cross-encoder {reference}", software)
