"""Register a model with MLflow: find it, create a version, store scores and card."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.sentence_modules import foreign_modules
from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.model import without_place
from rayembed.config.run import Run
from rayembed.errors import ArtifactError
from rayembed.models.loading.backbones import check_for_sentence_transformers
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import check_loadable, saved_widths
from rayembed.models.loading.saved_folder import SETTINGS_FILE, read_settings, saved_dimensions
from rayembed.pipeline.register.licences import base_licence, data_licences, task_facts
from rayembed.proof.proof import has_proof
from rayembed.proof.write import add_proof
from rayembed.registry.aliases import CANDIDATE
from rayembed.registry.card_parts import plain_card
from rayembed.registry.mlflow_run import FINGERPRINT_TAG, as_tracking_error
from rayembed.registry.model_card import CARD_FILE, hub_name, model_card
from rayembed.registry.register import describe, find_version, make_version
from rayembed.registry.registered_model import (
    SCHEME,
    ModelReference,
    artifact_text,
    connect,
    download,
    get_version,
    keep_scores,
    model_settings,
    parse_reference,
    read_scores,
    training_run,
    version_has_proof,
    weights_of,
)
from rayembed.registry.tracking import Tracker
from rayembed.results.files import find_results, read_results
from rayembed.results.scores import TaskScore

logger = logging.getLogger(__name__)

SHARE_TAG = "rayembed.trained_share"
"""Tag of a version: share of the trained model in it, for a card that is written later."""
COMPATIBLE_TAG = "rayembed.compatible_with"
"""Old model in whose space the version's vectors lie."""
LICENCE_TAG = "rayembed.base_licence"
"""Tag of a training's MLflow run: licence of the base model, read where it lies."""


@dataclass(frozen=True)
class Training:
    """How a model was trained, as its card describes it."""

    run: Run
    provenance: Mapping[str, Any]
    table: str
    """Scores of the run's models in Markdown; empty if none were taken."""
    share: float = 1.0
    """Share of the trained model in the kept one: 0 is the start, 1 the trained model itself."""
    recorded: Mapping[str, str] | None = None
    """Tags of its MLflow run, if the run was read from there: fingerprint and licence do not follow
    from its `run.yaml`, which names no place of the machine."""

    @property
    def global_step(self) -> int:
        """Training step of the kept model, counted over all stages; 0 for the untrained model."""
        return self.run.total_steps if self.share else 0

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the run's settings at the time of training."""
        return self.run.fingerprint if self.recorded is None else self.recorded[FINGERPRINT_TAG]

    def base_licence(self) -> str:
        """Licence of the base model; empty if unknown."""
        if self.recorded is None:
            return base_licence(self.run.model.backbone.path)
        return self.recorded.get(LICENCE_TAG, "")


@dataclass(frozen=True)
class Candidate:
    """A model that is registered or about to be, with its scores."""

    reference: str
    folder: Path | None
    """Folder with the model; None: it was named as a version, which has everything needed."""
    weights: str
    """Fingerprint of the weights."""
    number: int | None
    """Number of its version; None if it has none yet."""
    kept_scores: tuple[TaskScore, ...] = ()
    """Scores stored with the version."""
    new_scores: tuple[TaskScore, ...] = ()
    results: Path | None = None
    """Folder with the files of the new scores."""
    training: Training | None = None
    """Training that made it; None: read it from the version's MLflow run, if any."""

    @property
    def scores(self) -> tuple[TaskScore, ...]:
        """All scores sorted by task; new scores replace stored ones."""
        merged = {score.task: score for score in (*self.kept_scores, *self.new_scores)}
        return tuple(merged[task] for task in sorted(merged))


@dataclass(frozen=True)
class RegisteredVersion:
    """One version of a registered model in MLflow."""

    name: str
    version: int
    uri: str
    """`models:/<name>/<version>`: this version, independent of aliases."""
    alias_uri: str
    """`models:/<name>@<alias>`; equals `uri` if no alias was set."""
    card: str = field(default="", compare=False, repr=False)
    """Card for the model's folder, if it was written in this call."""


OpenTracker = Callable[[], AbstractContextManager[Tracker]]
"""Opens the MLflow run that a new version belongs to."""


def find_candidate(
    client: Any,
    reference: str,
    name: str,
    *,
    results: str | None,
    trusted: bool,
    tracking_uri: str,
) -> Candidate:
    """Find the model and check everything that its registration needs, without changing
    anything.

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
    candidate = Candidate(reference, folder, weights, number)
    place = None if results is None else resolve(results)
    return _with_scores(client, candidate, name, place, trusted=trusted)


def register_trained(
    training: Training,
    model: str,
    tracker: Tracker,
    results: Path | None,
    *,
    may_be_candidate: bool = True,
) -> RegisteredVersion:
    """Register a run's model with its card and scores, and return the version.

    Args:
        model: folder of the model in storage; it gets the card, too.
        results: mteb's result files of the model; None: it was not scored.
        may_be_candidate: whether the alias may be moved.

    Raises:
        RayembedError: as `put`.
    """
    run = training.run
    name = run.placement.registered_model or run.name
    dimensions = saved_dimensions(resolve(join(model, SETTINGS_FILE)))
    measured = () if results is None else read_results(results, task_facts)
    card = _card(training, name, dimensions[0], measured, proved=has_proof(model)).encode()
    place = join(model, CARD_FILE)
    # Before the model is fetched: with a new file it is fetched again.
    if not exists(place) or read_bytes(place) != card:
        write_atomic(place, card)
    folder = resolve_model(model)
    check_registrable(folder)
    weights = weights_fingerprint(folder)
    if licence := training.base_licence():
        tracker.set_tags({LICENCE_TAG: licence})
    client = connect(tracker.tracking_uri)
    with as_tracking_error(tracker.tracking_uri):
        number = find_version(client, name, weights)
        candidate = Candidate(model, folder, weights, number, training=training)
        candidate = _with_scores(client, candidate, name, results)
        return put(
            client,
            candidate,
            name,
            lambda: nullcontext(tracker),
            may_be_candidate=may_be_candidate,
        )


def _with_scores(
    client: Any, candidate: Candidate, name: str, results: Path | None, *, trusted: bool = False
) -> Candidate:
    """Add the scores stored with the candidate's version, and those in the folder `results` of the
    same weights.
    """
    kept: tuple[TaskScore, ...] = ()
    if candidate.number is not None:
        reference = ModelReference(name, candidate.number, None)
        kept = read_scores(client, get_version(client, reference))
    if results is None:
        return replace(candidate, kept_scores=kept)
    place = find_results(results, candidate.weights, trusted=trusted)
    new = read_results(place, task_facts)
    return replace(candidate, kept_scores=kept, new_scores=new, results=place)


def check_registrable(folder: Path) -> None:
    """Check that sentence-transformers can load the folder, because the registered model
    does so.

    Raises:
        ArtifactError: it is of another format, or needs code that it brings itself.
    """
    if not (folder / "modules.json").is_file():
        raise ArtifactError(
            f"{str(folder)!r} cannot be registered: it has no modules.json, so it is not in "
            "sentence-transformers format. SentenceTransformer(folder).save(other_folder) writes it"
        )
    check_for_sentence_transformers(folder)
    if foreign := foreign_modules(folder):
        raise ArtifactError(
            f"{str(folder)!r} cannot be registered: its modules {foreign} are code that it "
            "brings itself, which is never run. Load the model with "
            "rayembed.models.loading.load.load_model and save it to another folder"
        )


def put(
    client: Any,
    candidate: Candidate,
    name: str,
    open_tracker: OpenTracker,
    *,
    may_be_candidate: bool = True,
    card_file: Path | None = None,
) -> RegisteredVersion:
    """Write scores and card to the candidate's version, created if needed; with scores it gets the
    alias `candidate`.

    The one road into the registry, for training and for the registry job. A candidate that was
    interrupted here goes on where it stopped; one that is there stays. The alias `candidate` comes
    last and only to a version with scores: to a candidate that has a folder, and to a version that
    had no scores before.

    Args:
        open_tracker: called when a version is made.
        may_be_candidate: whether the alias may be moved.
        card_file: where to write the card, too.

    Raises:
        ArtifactError: the model cannot be registered, such as for weights that are not finite.
        TrackingError: MLflow is away or refuses.
    """
    number = candidate.number or _make_version(candidate, name, open_tracker)
    version = get_version(client, ModelReference(name, number, None))
    if candidate.new_scores:
        step = candidate.training.global_step if candidate.training else 0
        keep_scores(client, version, candidate.new_scores, candidate.results, step=step)
    card = ""
    if candidate.new_scores or candidate.folder is not None or card_file is not None:
        training = candidate.training or _training_of(client, version)
        if candidate.training is not None:
            tag = partial(client.set_model_version_tag, name, str(number))
            tag(SHARE_TAG, f"{(trained := candidate.training).share:g}")
            if (old := trained.run.stages[-1].compatible_with) and trained.share:
                tag(COMPATIBLE_TAG, without_place(old.model))
        dimensions = int((model_settings(client, version).get("dimensions") or [0])[0])
        card_of = partial(_plain_card, candidate, name, dimensions)
        if training is not None:
            card_of = partial(_card, training, name, dimensions, candidate.scores)
        proved = version_has_proof(client, version)
        card = card_of(proved=proved)
        describe(client, name, number, card)
        client.log_text(version.run_id, card, f"scores/{candidate.weights}/{CARD_FILE}")
        if candidate.folder is not None and proved and not has_proof(str(candidate.folder)):
            card = card_of(proved=False)  # goes with the folder
        if card_file is not None:
            write_atomic(card_file, card.encode())
    uri = f"models:/{name}/{number}"
    named = candidate.folder is not None or not candidate.kept_scores
    if not (may_be_candidate and named and candidate.scores):
        return RegisteredVersion(name, number, uri, uri, card)
    client.set_registered_model_alias(name, CANDIDATE, str(number))
    return RegisteredVersion(name, number, uri, f"models:/{name}@{CANDIDATE}", card)


def _make_version(candidate: Candidate, name: str, open_tracker: OpenTracker) -> int:
    folder, training = candidate.folder, candidate.training
    assert folder is not None
    is_own = (folder / SETTINGS_FILE).is_file()
    with open_tracker() as tracker:
        return make_version(
            folder,
            name,
            tracker=tracker,
            weights_fingerprint=candidate.weights,
            dimensions=_dimensions(folder),
            instruction_template=read_settings(folder).template if is_own else None,
            global_step=training.global_step if training else 0,
            complete=_with_proof,
        )


def _with_proof(folder: Path) -> None:
    """Write the reference vectors (proof) of a folder without them that rayembed can load."""
    try:
        check_loadable(folder)
    except ArtifactError as error:
        logger.warning("the model is registered without reference vectors (proof/): %s", error)
        return
    add_proof(folder)


@contextmanager
def own_run(
    candidate: Candidate, name: str, tracking_uri: str, experiment: str
) -> Iterator[Tracker]:
    """Open an MLflow run, named by the weights, for a model that rayembed did not train here."""
    shown = without_place(candidate.reference)
    with (
        tempfile.TemporaryDirectory(prefix="registration-") as scratch,
        Tracker.open(
            tracking_uri,
            experiment,
            f"{name}-{candidate.weights}",
            candidate.weights,
            {"model.reference": shown, "model.weights": candidate.weights},
            {},
            folder=scratch,
            total_steps=1,
        ) as tracker,
    ):
        yield tracker


def _card(
    training: Training, name: str, dimensions: int, scores: Sequence[TaskScore], *, proved: bool
) -> str:
    return model_card(
        training.run,
        fingerprint=training.fingerprint,
        dimensions=dimensions,
        scores=training.table,
        provenance=training.provenance,
        registered_model=name,
        share=training.share,
        results=scores,
        base_licence=training.base_licence(),
        data_licences=data_licences(training.run),
        proved=proved,
    )


def _plain_card(candidate: Candidate, name: str, dimensions: int, *, proved: bool) -> str:
    return plain_card(
        name,
        reference=without_place(candidate.reference),
        hub_name=hub_name(candidate.reference),
        licence=base_licence(candidate.reference, candidate.folder),
        dimensions=dimensions,
        registered_model=name,
        results=candidate.scores,
        proved=proved,
    )


def _training_of(client: Any, version: Any) -> Training | None:
    """Read how a version was trained from its MLflow run; None if rayembed did not train it."""
    run_id = version.run_id
    run = training_run(client, run_id)
    if run is None:
        return None
    provenance = artifact_text(client, run_id, "provenance.json")
    table = artifact_text(client, run_id, "scores.md")
    share = float(version.tags.get(SHARE_TAG, 1))
    recorded = dict(client.get_run(run_id).data.tags)
    return Training(run, json.loads(provenance or "{}"), table or "", share, recorded)


def _dimensions(folder: Path) -> tuple[int, ...]:
    """Widths to which the model's vectors can be cut, read without its weights if possible."""
    try:
        return saved_widths(folder)
    except ArtifactError:
        if (folder / SETTINGS_FILE).is_file():
            raise
        from sentence_transformers import SentenceTransformer

        return (int(SentenceTransformer(str(folder), device="cpu").get_embedding_dimension()),)
