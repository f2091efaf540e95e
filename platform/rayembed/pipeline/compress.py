"""A model compressed in several ways; every variant scored, measured and registered."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import check_writable, is_remote, join
from rayembed.compression.contract import CalibrationText, Compression, Source
from rayembed.compression.measure import Measured, measure
from rayembed.config.compression import CompressionConfig
from rayembed.config.compression_run import CompressionRun
from rayembed.config.document import fingerprint
from rayembed.config.evaluation_run import EvaluationPlacement, EvaluationRun
from rayembed.config.run import Run
from rayembed.config.scores import Scores
from rayembed.cores import num_cores
from rayembed.errors import ConfigError
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.rayembed_spec import find_folder
from rayembed.evaluation.registered_folder import pinned_reference
from rayembed.evaluation.score import ModelScores
from rayembed.models.compressed import read_compression
from rayembed.models.files import weights_fingerprint
from rayembed.models.load import check_loadable, computed_dtype
from rayembed.pipeline.calibration import calibration_texts, run_of_folder
from rayembed.pipeline.evaluate import evaluate
from rayembed.pipeline.storage import placed
from rayembed.progress import doing
from rayembed.registry.registered_model import SCHEME
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed.training.export import upload_model

logger = logging.getLogger(__name__)

ORIGINAL = "original"
"""Label of the model that is compressed."""


@dataclass(frozen=True)
class Variant:
    """The model, or what one way made of it."""

    label: str
    way: CompressionConfig | None
    """None: it is the model itself."""
    reference: str
    """Where it is loaded from."""
    folder: Path
    """The same on this machine."""
    bytes_on_disk: int
    """Size of its folder."""
    share: float | None = None
    """Share of all weights that was pruned, quantised or removed; None of the model itself."""
    by_part: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Weights of each part, and how many of them were."""
    scored: ModelScores | None = None
    measured: Measured | None = None

    @property
    def scores(self) -> dict[str, float]:
        """Main score by task."""
        return {} if self.scored is None else self.scored.scores

    @property
    def mean(self) -> float | None:
        """Mean of its tasks' scores; None without any."""
        scores = self.scores
        return sum(scores.values()) / len(scores) if scores else None


@dataclass(frozen=True)
class CompressionResult:
    """The model and its variants, in the order of their ways."""

    run: CompressionRun
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Ready:
    """A compression of which all is known that needs no work."""

    run: CompressionRun
    """Its model is pinned, its storage means the same everywhere."""
    folder: Path
    """The model on this machine."""
    texts: Sequence[CalibrationText]
    """Calibration texts; none where nothing needs any."""


def compress(known: Ready) -> CompressionResult:
    """Make, score and measure the variants; what is there already is not made or scored again.

    Raises:
        RayembedError: a task cannot be scored, or a result is not what was asked for.
    """
    run, folder, texts = known.run, known.folder, known.texts
    check_writable(run.placement.storage_path)
    original = Variant(ORIGINAL, None, run.model.reference, folder, _bytes(folder))
    weights = weights_fingerprint(folder)
    variants = [original, *(_made(run, way, folder, weights, texts) for way in run.ways)]
    if run.any_tasks:
        variants = [replace(variant, scored=_scored(run, variant)) for variant in variants]
    return CompressionResult(run, tuple(_measured(run, variants, _documents(texts))))


def ready(run: CompressionRun) -> Ready:
    """The compression after all checks that need no work.

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
        _way(way).check(folder)
    task_factories(run)
    known = run_of_folder(folder)
    if known is None and reference.startswith(SCHEME):
        known = _registered_run(reference, tracking_uri, placement.storage_path)
    return Ready(run, folder, _texts(run, known, folder.name))


def _texts(run: CompressionRun, known: Run | None, stage: str) -> list[CalibrationText]:
    """The calibration texts, as many as each way asks for at least."""
    number = run.calibration.number
    for way in run.ways:
        if number < way.fewest_texts:
            raise ConfigError(
                f"{way.label} takes no fewer than {way.fewest_texts} calibration texts, but "
                f"calibration.number = {number}; raise it, and name files by --texts where what "
                "the model was trained on has fewer"
                + ("; jobs/make_sizes.py cuts by all of them" if way.is_cut else "")
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
            f"{error}. Here only the measurement of speed needs them; --set speed=null leaves it "
            "out"
        ) from None


def _documents(texts: Sequence[CalibrationText]) -> list[str]:
    """Texts that speed is measured with: the different documents; all where there are none."""
    documents = [text.text for text in texts if text.role == "document"]
    return list(dict.fromkeys(documents or [text.text for text in texts]))


def _way(way: CompressionConfig) -> Compression:
    assert isinstance(way, Compression)
    return way


def _registered_run(reference: str, tracking_uri: str, storage: str) -> Run | None:
    """The run that trained a registered model, from MLflow; None: rayembed did not train it.

    Args:
        storage: where a run on disk is looked for, of whose storage MLflow has the name alone.
    """
    from rayembed.pipeline.registration import training_run
    from rayembed.registry.registered_model import connect, get_version, parse_reference

    client = connect(tracking_uri)
    found = training_run(client, get_version(client, parse_reference(reference)).run_id)
    if found is None:
        return None
    its = found.placement.storage_path
    if is_remote(its) or Path(its).is_absolute():
        return found
    placement = found.placement.model_copy(update={"storage_path": storage})
    return found.model_copy(update={"placement": placement})


def _made(
    run: CompressionRun,
    way: CompressionConfig,
    folder: Path,
    weights: str,
    texts: Sequence[CalibrationText],
) -> Variant:
    """The variant of a way, made unless it is there."""
    made_of: dict[str, Any] = {"way": way.model_dump(mode="json"), "weights": weights}
    if way.needs_texts:
        made_of["texts"] = fingerprint(texts)
    place = join(
        run.placement.storage_path,
        *("compressed", run.title, f"{way.label}-{fingerprint(made_of)[:8]}"),
    )

    def save(output: Path) -> None:
        _way(way).compress(Source(folder, texts), output)

    with doing(f"compressing by {way.label}"):
        upload_model(place, json.dumps(made_of, indent=1, sort_keys=True).encode(), save)
    found = resolve_model(place)
    told = read_compression(found) or {}
    by_part = {part: (int(all_), int(some)) for part, (all_, some) in told["by_part"].items()}
    share = int(told["compressed"]) / int(told["weights"])
    return Variant(way.label, way, place, found, _bytes(found), share, by_part)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _scored(run: CompressionRun, variant: Variant) -> ModelScores:
    """Scores of a variant by the one road; raises what a task raised."""
    name = f"rayembed/{run.title}-{variant.label}"
    model = run.model.model_copy(update={"reference": variant.reference, "name": name})
    scores = {name: getattr(run, name) for name in Scores.model_fields}
    placement = run.placement.model_dump(include=set(EvaluationPlacement.model_fields))
    with doing(f"scoring {variant.label}"):
        evaluated = evaluate(
            EvaluationRun(model=model, placement=EvaluationPlacement(**placement), **scores)
        )
    for _, error in evaluated.failed:
        raise error
    return evaluated.scored


def _measured(
    run: CompressionRun, variants: Sequence[Variant], documents: Sequence[str]
) -> list[Variant]:
    """The variants with their speed: the best of rounds in which each has its turn."""
    settings = run.speed
    if settings is None:
        return list(variants)
    if not documents:
        raise ConfigError("no texts to measure speed with; name some (calibration.path)")
    once = partial(
        measure,
        documents=documents[: settings.documents],
        threads=settings.threads or num_cores(),
    )
    best: dict[str, Measured] = {}
    for number in range(settings.rounds):
        for variant in variants:
            with doing(f"measuring {variant.label}, round {number + 1} of {settings.rounds}"):
                dtype = computed_dtype(variant.folder, run.model.dtype, "cpu")
                found = once(variant.folder, dtype=dtype)
            before = best.get(variant.label, found)
            best[variant.label] = Measured(
                max(before.documents_per_second, found.documents_per_second),
                min(before.memory, found.memory),
            )
    return [replace(variant, measured=best[variant.label]) for variant in variants]
