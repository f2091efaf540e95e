"""Compress a model in several ways; score, measure and register every variant."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import check_writable, is_remote, join
from rayembed.config.document import fingerprint
from rayembed.config.evaluation import EvaluationPlacement
from rayembed.config.run import Run
from rayembed.data.mining.documents import documents_in
from rayembed.data.plan.batch_plan import TRAINING, BatchPlan
from rayembed.display.progress import doing
from rayembed.errors import ArtifactError, ConfigError, StorageError
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.score import ModelScores
from rayembed.machine.cores import num_cores
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import check_loadable, computed_dtype
from rayembed.models.saving.export import read_compression
from rayembed.pipeline.evaluate.variants import (
    Scored,
    Variant,
    folder_bytes,
    score_all,
    score_saved,
)
from rayembed.pipeline.run.folders import plan_of
from rayembed.pipeline.storage import placed
from rayembed.registry.registered_model import SCHEME, find_folder, pinned_reference
from rayembed.registry.run_folder import RUN_FILE
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed.training.checkpoints.export import upload_model
from rayembed_extras.compression.contract import CalibrationText, Compression, CompressionSource
from rayembed_extras.compression.measure import Measured, measure
from rayembed_extras.compression.run_settings import CalibrationConfig, CompressionRun

logger = logging.getLogger(__name__)

_POOL = 20
"""Texts read from files for each text that is drawn."""


@dataclass(frozen=True)
class CompressedModel:
    """A model in a compression's results: the original, or the variant made by one method."""

    reference: str
    """Reference from which the model is loaded."""
    folder: Path
    """Local path of the same model."""
    share: float | None = None
    """Share of all weights that was pruned, quantised or removed; None for the original model."""
    by_part: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Weights of each part, and the number of them that were compressed."""
    measured: Measured | None = None

    @cached_property
    def bytes_on_disk(self) -> int:
        """Size of the model's folder in bytes."""
        return folder_bytes(self.folder)


@dataclass(frozen=True)
class CompressionResult:
    """The original model and its variants, in the order of the compression methods."""

    run: CompressionRun
    variants: tuple[Scored[CompressedModel], ...]


@dataclass(frozen=True)
class Ready:
    """A compression that has passed all checks that need no computation, with its inputs."""

    run: CompressionRun
    """The run, with a pinned model and a storage path that all nodes can resolve."""
    folder: Path
    """Local folder of the model."""
    texts: Sequence[CalibrationText]
    """Calibration texts; empty if no method needs them."""


def compress(known: Ready) -> CompressionResult:
    """Make, score and measure the variants; existing variants and scores are reused.

    Raises:
        RayembedError: a task cannot be scored, or a result is not what was asked for.
    """
    run = known.run
    check_writable(run.placement.storage_path)
    original = Variant("original", partial(CompressedModel, run.model.reference, known.folder))
    variants = [Variant(way.label, partial(_made, known, way)) for way in run.ways]
    for variant in variants:  # before any is scored: one that cannot be made is seen first
        variant.make()
    scored = score_all([original, *variants], partial(_score, run))
    return CompressionResult(run, _measured(run, list(scored), _documents(known.texts)))


def ready(run: CompressionRun) -> Ready:
    """Prepare the compression: do all checks that need no computation.

    Raises:
        RayembedError: a way cannot take the model, or there are too few calibration texts.
    """
    run = placed(run)
    placement = run.placement
    tracking_uri = resolve_tracking_uri(
        placement.tracking_uri, placement.storage_path, make_folder=False
    )
    reference = pinned_reference(run.model.reference, tracking_uri)
    run = run.model_copy(update={"model": run.model.model_copy(update={"reference": reference})})
    folder = find_folder(reference, tracking_uri)
    check_loadable(folder)
    for way in run.ways:
        way.check(folder)
    task_factories(run)
    known = run_of_folder(folder)
    if known is None and reference.startswith(SCHEME):
        known = _registered_run(reference, tracking_uri, placement.storage_path)
    return Ready(run, folder, _texts(run, known, folder.name))


def _texts(run: CompressionRun, known: Run | None, stage: str) -> list[CalibrationText]:
    """Read calibration texts; raise if a method needs more than the settings request."""
    number = run.calibration.number
    for way in run.ways:
        if number < way.fewest_texts:
            raise ConfigError(
                f"{way.label} needs at least {way.fewest_texts} calibration texts, but "
                f"calibration.number = {number}; raise calibration.number, and name files by "
                "--texts if the model's training data have fewer texts"
                + ("; rayembed sizes uses all texts of the training data" if way.is_cut else "")
            )
    needed = any(way.needs_texts for way in run.ways)
    if not needed and run.speed is None:
        return []
    try:
        return calibration_texts(run.calibration, known, stage, model=run.model.reference)
    except ConfigError as error:
        if needed:
            raise
        raise ConfigError(
            f"{error}. Only the speed measurement needs these texts; skip it with --set speed=null"
        ) from None


def _documents(texts: Sequence[CalibrationText]) -> list[str]:
    """Select the texts for the speed measurement: distinct documents, or all texts if none is a
    document.
    """
    documents = [text.text for text in texts if text.role == "document"]
    return list(dict.fromkeys(documents or [text.text for text in texts]))


def _registered_run(reference: str, tracking_uri: str, storage: str) -> Run | None:
    """Find the run that trained a registered model, from MLflow; None if rayembed did not
    train it.

    Args:
        storage: where a run on disk is looked for, of whose storage MLflow has the name alone.
    """
    from rayembed.registry.registered_model import (
        connect,
        get_version,
        parse_reference,
        training_run,
    )

    client = connect(tracking_uri)
    found = training_run(client, get_version(client, parse_reference(reference)).run_id)
    if found is None:
        return None
    its = found.placement.storage_path
    if is_remote(its) or Path(its).is_absolute():
        return found
    placement = found.placement.model_copy(update={"storage_path": storage})
    return found.model_copy(update={"placement": placement})


def _made(known: Ready, way: Compression) -> CompressedModel:
    """Return the variant of a method; make it if it does not exist."""
    run = known.run
    place = join(run.placement.storage_path, "compressed", run.title)
    with doing(f"compressing by {way.label}"):
        reference = make_smaller(place, way.label, [way], known.folder, known.texts)
    folder = resolve_model(reference)
    note = read_compression(folder) or {}
    by_part = {part: (int(all_), int(some)) for part, (all_, some) in note["by_part"].items()}
    return CompressedModel(
        reference, folder, int(note["compressed"]) / int(note["weights"]), by_part
    )


def make_smaller(
    place: str,
    label: str,
    ways: Sequence[Compression],
    folder: Path,
    texts: Sequence[CalibrationText],
) -> str:
    """Apply compression methods to a model one after the other, unless the result exists; return
    its folder.

    Args:
        place: folder in storage of all variants.
        label: begins the name of the folder, beside a hash of ways, weights and texts.
        folder: the model.
    """
    made_of: dict[str, Any] = {
        "ways": [way.model_dump(mode="json") for way in ways],
        "weights": weights_fingerprint(folder),
    }
    if any(way.needs_texts for way in ways):
        made_of["texts"] = fingerprint(texts)
    target = join(place, f"{label}-{fingerprint(made_of)[:8]}")

    def save(output: Path) -> None:
        with TemporaryDirectory(prefix="smaller-") as scratch:
            source = folder
            for number, way in enumerate(ways, start=1):
                made = output if number == len(ways) else Path(scratch) / str(number)
                way.compress(CompressionSource(source, texts), made)
                source = made

    upload_model(target, json.dumps(made_of, indent=1, sort_keys=True).encode(), save)
    return target


def _score(run: CompressionRun, label: str, made: CompressedModel) -> ModelScores | None:
    """Score a variant on the run's tasks; None if the run names no tasks."""
    if not run.any_tasks:
        return None
    named = {"reference": made.reference, "name": f"rayembed/{run.title}-{label}"}
    placement = run.placement.model_dump(include=set(EvaluationPlacement.model_fields))
    model = run.model.model_copy(update=named)
    return score_saved(label, model, run, EvaluationPlacement(**placement))


def _measured(
    run: CompressionRun, variants: Sequence[Scored[CompressedModel]], documents: Sequence[str]
) -> tuple[Scored[CompressedModel], ...]:
    """Add each variant's best speed of several rounds; a round measures every variant once."""
    settings = run.speed
    if settings is None:
        return tuple(variants)
    if not documents:
        raise ConfigError(
            "there are no document texts to measure speed with; name texts by calibration.path, or "
            "skip the measurement with --set speed=null"
        )
    documents, threads = documents[: settings.documents], settings.threads or num_cores()
    rounds: list[list[Measured]] = [[] for _ in variants]
    for number in range(settings.rounds):
        for variant, measured in zip(variants, rounds, strict=True):
            folder = variant.made.folder
            with doing(f"measuring {variant.label}, round {number + 1} of {settings.rounds}"):
                dtype = computed_dtype(folder, run.model.dtype, "cpu")
                measured.append(measure(folder, documents, dtype=dtype, threads=threads))
    best = [
        Measured(max(m.documents_per_second for m in of), min(m.memory for m in of))
        for of in rounds
    ]
    return tuple(
        replace(variant, made=replace(variant.made, measured=measured))
        for variant, measured in zip(variants, best, strict=True)
    )


def calibration_texts(
    settings: CalibrationConfig, run: Run | None, stage: str, *, model: str
) -> list[CalibrationText]:
    """Draw distinct texts, as many as the settings request, from files or from the model's training
    data.

    Of a run both sides of its rows are taken in turn, each with its instruction; of a batch plan
    nothing is held out. Of files the first rows are drawn from, twenty for each text.

    Args:
        run: what trained the model; None: not known.
        stage: its stage whose model it is; another name stands for the last one.
        model: its reference, for messages.

    Raises:
        ConfigError: nothing is named and the run is not known; or there are too few texts.
        RayembedError: the files or the plan cannot be read.
    """
    random = np.random.default_rng(settings.seed)
    if settings.path is not None:
        found = _of_files(settings, random)
        where = settings.path
    elif run is not None:
        found, where = _of_plan(run, stage, random), f"the batch plan of the run {run.name}"
    else:
        raise ConfigError(
            f"no calibration texts: the training data of {model!r} are not known, because the "
            "model is neither in the folder of a run nor registered by a run; name texts by "
            "calibration.path=FILE (--texts), with the column calibration.documents or "
            "calibration.queries"
        )
    texts: dict[CalibrationText, None] = {}
    for text in found:
        texts[text] = None
        if len(texts) == settings.number:
            return list(texts)
    raise ConfigError(
        f"{where} has {len(texts)} distinct texts, but calibration.number is {settings.number}; "
        f"set calibration.number={len(texts)} or name more texts by calibration.path"
    )


def _of_plan(run: Run, stage: str, random: np.random.Generator) -> Iterator[CalibrationText]:
    stages = [one.name for one in run.stages]
    try:
        plan = BatchPlan.open(plan_of(run, stage if stage in stages else stages[-1]))
    except StorageError:
        raise
    except ArtifactError as error:
        raise ConfigError(
            "the calibration texts cannot be read, because the batch plan that the model was "
            f"trained on is gone ({error}); name texts by calibration.path=FILE"
        ) from None
    for step in random.permutation(plan.num_steps):
        for record in plan.read(int(step), 0, 1, TRAINING):
            yield CalibrationText(record.query, "query", record.query_instruction)
            yield CalibrationText(record.positives[0], "document", record.document_instruction)


def _of_files(
    settings: CalibrationConfig, random: np.random.Generator
) -> Iterator[CalibrationText]:
    assert settings.path is not None
    columns = {"document": settings.documents, "query": settings.queries}
    named = {role: column for role, column in columns.items() if column is not None}
    if not named:
        raise ConfigError(
            "calibration.documents and calibration.queries are both null; name the column of the "
            f"texts in {settings.path}"
        )
    drawn = []
    for role, column in named.items():
        texts: dict[str, None] = {}
        for text in documents_in(settings.path, column):
            texts[text] = None
            if len(texts) == _POOL * settings.number:
                break
        known = list(texts)
        order = random.permutation(len(known))
        drawn.append([CalibrationText(known[place], role) for place in order])  # type: ignore[arg-type]
    for place in range(max(map(len, drawn))):
        yield from (texts[place] for texts in drawn if place < len(texts))


def run_of_folder(folder: Path) -> Run | None:
    """Find the run whose folder contains the model, `<run>/models/<stage>`; None if there
    is none.
    """
    path = folder.resolve().parent.parent / RUN_FILE
    if folder.resolve().parent.name != "models" or not path.is_file():
        return None
    try:
        return Run.read(path)
    except ConfigError as error:
        logger.warning("the settings of the model's run, %s, cannot be read: %s", path, error)
        return None
