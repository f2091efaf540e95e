"""A model on its way into the registry: what it is, its version, its scores, its card."""

import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.sentence_modules import foreign_modules
from rayembed.assets.storage import write_atomic
from rayembed.config.model import without_place
from rayembed.config.run import Run
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.export import SETTINGS_FILE, read_settings, saved_dimensions
from rayembed.models.fingerprints import weights_fingerprint
from rayembed.models.json_file import read_json
from rayembed.models.nomic_moe_checkpoint import check_for_sentence_transformers
from rayembed.models.sentence_folder import read_encoder_folder
from rayembed.pipeline.licences import base_licence, data_licences
from rayembed.pipeline.task_facts import task_facts
from rayembed.registry.card_parts import plain_card
from rayembed.registry.model_card import CARD_FILE, hub_name, instruction_template, model_card
from rayembed.registry.register import describe, find_version, register
from rayembed.registry.registered_model import (
    SCHEME,
    ModelReference,
    download,
    get_version,
    keep_scores,
    model_settings,
    parse_reference,
    read_scores,
    weights_of,
)
from rayembed.registry.scores import TaskScore, find_results, read_results
from rayembed.registry.tracking import Status, Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A model that is registered, or is going to be."""

    reference: str
    folder: Path | None
    """None: it was named as a version, which has all that is needed."""
    weights: str
    """Their fingerprint."""
    number: int | None
    """Of its version; None: it has none yet."""
    scores: tuple[TaskScore, ...]
    """Those kept with the version, with the new ones in place of older ones."""
    new_scores: tuple[TaskScore, ...]
    results: Path | None
    """Folder of the new ones' files."""


def find_candidate(
    client: Any,
    reference: str,
    name: str,
    *,
    results: str | None,
    trusted: bool,
    tracking_uri: str,
) -> Candidate:
    """The candidate, after all that it needs was found to be there; changes nothing.

    Args:
        name: of the registered model.
        results: folder or `s3://…`, see `find_results`; None: only the scores that are kept
            with the version.
        trusted: whether results that name no weights are taken as those of this model.

    Raises:
        RayembedError: no such model or version, or no scores of these weights in `results`.
    """
    folder, number = None, None
    if reference.startswith(SCHEME):
        asked = parse_reference(reference)
        version = get_version(client, asked)
        if asked.name == name:
            number, weights = int(version.version), weights_of(version)
        else:
            folder = download(client, version, tracking_uri=tracking_uri)
    else:
        folder = resolve_model(reference)
    if folder is not None:
        check_registrable(folder)
        weights = weights_fingerprint(folder)
        number = find_version(client, name, weights)
    place: Path | None = None
    new: tuple[TaskScore, ...] = ()
    if results is not None:
        place = find_results(resolve(results), weights, trusted=trusted)
        new = read_results(place, task_facts)
    kept: tuple[TaskScore, ...] = ()
    if number is not None:
        kept = read_scores(client, get_version(client, ModelReference(name, number, None)))
    merged = {score.task: score for score in (*kept, *new)}
    scores = tuple(merged[task] for task in sorted(merged))
    return Candidate(reference, folder, weights, number, scores, new, place)


def check_registrable(folder: Path) -> None:
    """Return when the registered model could load the folder, by sentence-transformers.

    Raises:
        ArtifactError: it is of another format, or needs code that it brings itself.
    """
    if not (folder / "modules.json").is_file():
        raise ArtifactError(
            f"{str(folder)!r} cannot be registered: it has no modules.json, so it is not in "
            "sentence-transformers format. SentenceTransformer(folder).save(other) writes that"
        )
    check_for_sentence_transformers(folder)
    if foreign := foreign_modules(folder):
        raise ArtifactError(
            f"{str(folder)!r} cannot be registered: its modules {foreign} are code that it brings "
            "itself, which is never run. Load it with rayembed.models.load.load_model and save "
            "it to another folder"
        )


def put(
    client: Any,
    candidate: Candidate,
    name: str,
    *,
    tracking_uri: str,
    experiment: str,
    alias: str | None,
    card_file: Path | None = None,
) -> int:
    """The number of the candidate's version, which now has the scores and a card.

    A candidate that was interrupted here goes on where it stopped; one that is there stays.

    Args:
        alias: put on the version of a candidate that has a folder; None: no alias is moved.
        card_file: where to write the card, too.

    Raises:
        TrackingError: MLflow is away or refuses.
    """
    number = candidate.number
    if number is None:
        number = _register(candidate, name, tracking_uri=tracking_uri, experiment=experiment)
    version = get_version(client, ModelReference(name, number, None))
    scores = candidate.scores
    if candidate.new_scores:
        scores = keep_scores(client, version, candidate.new_scores, candidate.results)
    if candidate.new_scores or candidate.number is None or card_file is not None:
        card = _card(client, version, candidate, name, scores)
        describe(client, name, number, card)
        client.log_text(version.run_id, card, f"scores/{candidate.weights}/{CARD_FILE}")
        if card_file is not None:
            write_atomic(card_file, card.encode())
    if alias is not None and candidate.folder is not None:
        client.set_registered_model_alias(name, alias, str(number))
    return number


def _register(candidate: Candidate, name: str, *, tracking_uri: str, experiment: str) -> int:
    """The number of a new version, in a run of its own that is named by the weights."""
    folder = candidate.folder
    assert folder is not None
    shown = without_place(candidate.reference)
    with tempfile.TemporaryDirectory(prefix="registration-") as scratch:
        tracker = Tracker.open(
            tracking_uri,
            experiment,
            f"{name}-{candidate.weights}",
            candidate.weights,
            {"model.reference": shown, "model.weights": candidate.weights},
            {},
            folder=scratch,
            total_steps=1,
        )
        status: Status = "FAILED"
        try:
            version = register(
                folder,
                name,
                tracker=tracker,
                scores={},
                weights_fingerprint=candidate.weights,
                dimensions=_dimensions(folder),
                instruction_template=_template(folder),
                global_step=0,
                tags={},
                alias=None,
            )
            status = "FINISHED"
        finally:
            tracker.close(status)
    return version.version


def _card(
    client: Any, version: Any, candidate: Candidate, name: str, scores: tuple[TaskScore, ...]
) -> str:
    """The card, of the training run where there is one."""
    settings = model_settings(client, version)
    dimensions = int((settings.get("dimensions") or [0])[0])
    run = _training_run(client, version.run_id)
    if run is None:
        return plain_card(
            name,
            reference=without_place(candidate.reference),
            hub_name=hub_name(candidate.reference),
            licence=base_licence(candidate.reference, candidate.folder),
            dimensions=dimensions,
            registered_model=name,
            results=scores,
        )
    provenance = _artifact(client, version.run_id, "provenance.json")
    return model_card(
        run,
        dimensions=dimensions,
        scores=_artifact(client, version.run_id, "scores.md") or "",
        provenance=json.loads(provenance) if provenance else {},
        registered_model=name,
        results=scores,
        base_licence=base_licence(run.model.backbone.path),
        data_licences=data_licences(run),
    )


def _training_run(client: Any, run_id: str) -> Run | None:
    """The run that trained a version; None: it was not trained by rayembed, or by a later one."""
    text = _artifact(client, run_id, "run.yaml")
    if text is None:
        return None
    with tempfile.TemporaryDirectory(prefix="run-") as scratch:
        path = Path(scratch) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return Run.read(path)
        except ConfigError as error:
            logger.warning("the run.yaml of run %s cannot be read: %s", run_id, error)
            return None


def _artifact(client: Any, run_id: str, name: str) -> str | None:
    """The text of an artifact in the root of a run; None: it has none of that name."""
    if not any(file.path == name for file in client.list_artifacts(run_id)):
        return None
    with tempfile.TemporaryDirectory(prefix="artifact-") as scratch:
        return Path(client.download_artifacts(run_id, name, scratch)).read_text(encoding="utf-8")


def _dimensions(folder: Path) -> tuple[int, ...]:
    """Widths of the model's vectors, without its weights where its files tell."""
    if (folder / SETTINGS_FILE).is_file():
        return saved_dimensions(folder / SETTINGS_FILE)
    try:
        config, transformer, _ = read_encoder_folder(folder)
    except ArtifactError:
        from sentence_transformers import SentenceTransformer

        return (int(SentenceTransformer(str(folder), device="cpu").get_embedding_dimension()),)
    if config.projections:
        return (config.projections[-1].width,)
    return (int(read_json(transformer / "config.json")["hidden_size"]),)


def _template(folder: Path) -> str | None:
    own = (folder / SETTINGS_FILE).is_file()
    return instruction_template(read_settings(folder)) if own else None
