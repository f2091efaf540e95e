"""Calibration texts: what a model was trained on, or texts of files."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rayembed.compression.contract import CalibrationText
from rayembed.config.compression_run import CalibrationConfig
from rayembed.config.run import Run
from rayembed.data.plan.batch_plan import TRAINING, BatchPlan
from rayembed.errors import ArtifactError, ConfigError, StorageError
from rayembed.pipeline.corpus_job import documents_in
from rayembed.pipeline.run_folders import plan_of
from rayembed.registry.run_folder import RUN_FILE

logger = logging.getLogger(__name__)

_POOL = 20
"""Texts of files that are read for each one that is drawn."""


def calibration_texts(
    settings: CalibrationConfig, run: Run | None, stage: str, *, model: str
) -> list[CalibrationText]:
    """Different texts in the order of their draw, as many as the settings ask for.

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
            f"no calibration texts: what {model!r} was trained on is not known, for it is no model "
            "in a folder of a run and no registered model of one; name texts by "
            "calibration.path=FILE (--texts), with the column calibration.documents or "
            "calibration.queries"
        )
    texts: dict[CalibrationText, None] = {}
    for text in found:
        texts[text] = None
        if len(texts) == settings.number:
            return list(texts)
    raise ConfigError(
        f"{where} has {len(texts)} different texts, and calibration.number asks for "
        f"{settings.number}; set it to {len(texts)} or name more texts by calibration.path"
    )


def _of_plan(run: Run, stage: str, random: np.random.Generator) -> Iterator[CalibrationText]:
    stages = [one.name for one in run.stages]
    try:
        plan = BatchPlan.open(plan_of(run, stage if stage in stages else stages[-1]))
    except StorageError:
        raise
    except ArtifactError as error:
        raise ConfigError(
            f"the batch plan that the model was trained on is gone ({error}); name texts by "
            "calibration.path=FILE"
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
    """The run in whose folder a model lies, `<run>/models/<stage>`; None: it lies elsewhere."""
    path = folder.resolve().parent.parent / RUN_FILE
    if folder.resolve().parent.name != "models" or not path.is_file():
        return None
    try:
        return Run.read(path)
    except ConfigError as error:
        logger.warning("%s cannot be read: %s", path, error)
        return None
