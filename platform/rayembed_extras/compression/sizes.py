"""Make several smaller sizes of one model: cut each from it, train it with it as teacher, and score
it.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from shutil import copytree
from statistics import fmean
from typing import Any

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import check_writable, join, write_atomic
from rayembed.config.data_run import data_of
from rayembed.config.mining import Teacher
from rayembed.config.run import Run, without_general
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.engine.parts import read_records
from rayembed.data.mining.documents import documents_in
from rayembed.display.progress import doing
from rayembed.display.tables import Cell, Table
from rayembed.errors import ConfigError
from rayembed.evaluation.score import ModelScores
from rayembed.evaluation.tables import UNTRAINED, ScoreKey
from rayembed.losses.vector_distillation import VectorDistillation
from rayembed.models.layers import layers_of
from rayembed.models.loading.load import check_loadable, empty_model
from rayembed.pipeline.checks.files import check_at_hand
from rayembed.pipeline.data.jobs import do_steps
from rayembed.pipeline.evaluate.guard import own_tasks
from rayembed.pipeline.evaluate.variants import (
    MEGABYTE,
    Scored,
    Variant,
    folder_bytes,
    report_files,
    report_tables,
    score_all,
)
from rayembed.pipeline.run.report import Outcome
from rayembed.pipeline.run.train import train
from rayembed.pipeline.storage import placed
from rayembed.registry.registered_model import SCHEME, find_folder, pinned_reference
from rayembed.registry.tracking_uri import reachable_tracking_uri
from rayembed.training.checkpoints.export import upload_model
from rayembed_extras.compression.compress import make_smaller
from rayembed_extras.compression.contract import CalibrationText, Compression

Sizes = Mapping[str, Sequence[Compression]]
"""Label of a size, also used in its run's name → compression methods applied in turn."""

_WHOLE = "all"
"""Label of the original model."""


@dataclass(frozen=True)
class Member:
    """One model of the set of sizes: the original or a trained smaller one."""

    folder: Path
    """Path of the model on this machine."""
    place: str
    """Address of the model in storage."""
    outcome: Outcome | None = None
    """Outcome of its training; None for the original model."""

    @cached_property
    def figures(self) -> dict[str, object]:
        """Table heading → cell: parameters, bytes, speed, and the score before training."""
        model = empty_model(self.folder)
        backbone = model.parts["backbone"]
        cut = None if self.outcome is None else _own(self.outcome, UNTRAINED)
        return {
            "layers": len(layers_of([backbone])),
            "tokens": f"{backbone.get_input_embeddings().num_embeddings:,}",
            "M parameters": Cell(sum(p.numel() for p in model.parameters()) / 1e6, digits=2),
            "MB": Cell(folder_bytes(self.folder) / MEGABYTE, digits=1),
            "cut": Cell(None if cut is None else fmean(cut.scores.values()), digits=4),
        }


def make_sizes(
    run: Run,
    sizes: Sizes,
    texts: str | None = None,
    languages: Sequence[str] = (),
) -> list[Scored[Member]]:
    """Cut, train and score each size; existing results are reused.

    Args:
        run: data, stages, scores and placement of each size's training; its backbone is the whole
            model, whose settings take the place of the run's model's.
        sizes: label → what is done to the whole model, way after way.
        texts: files whose texts say which tokens are kept; None: the training data.
        languages: of the training data's texts that say so; none: all.

    Returns:
        The whole model, then each size in its order.

    Raises:
        RayembedError: what cannot be done, before anything is trained.
    """
    run = placed(run)
    check_writable(run.placement.storage_path)
    reference = _whole(run)
    folder = resolve_model(reference)
    for label, ways in sizes.items():
        for way in ways:
            way.check(folder)
        check_at_hand(recovery(run, label, reference, str(folder)))
    known: list[CalibrationText] = []
    if any(way.needs_texts for ways in sizes.values() for way in ways):
        known = _texts_of(run, texts, languages)

    def make(label: str, ways: Sequence[Compression]) -> Member:
        with doing(f"cutting {label}"):
            start = make_smaller(_folder(run), label, ways, folder, known)
        outcome = train(recovery(run, label, reference, start))
        return Member(resolve_model(outcome.model_folder), outcome.model_folder, outcome)

    def score(_: str, member: Member) -> ModelScores:
        assert member.outcome is not None
        return _own(member.outcome, ScoreKey(run.stages[-1].name))

    members: list[Scored[Member]] = [Scored(_WHOLE, Member(folder, reference))]
    variants = [Variant(label, partial(make, label, ways)) for label, ways in sizes.items()]
    for scored in score_all(variants, score):
        outcome = scored.made.outcome
        assert outcome is not None
        (baseline,) = outcome.run.evaluation.baselines
        whole = replace(members[0], result=_own(outcome, ScoreKey(baseline=baseline)))
        members = [whole, *members[1:], scored]
        # After each size: what is done is seen, though a later one may fail.
        write_report(run, members)
    return members


def _own(outcome: Outcome, key: ScoreKey) -> ModelScores:
    """Select the scores on the run's own tasks; all scores if none of the tasks is its own."""
    scores, own = outcome.scores[key], own_tasks(outcome.run)
    tasks = [task for task in scores.tasks if task.name in own]
    return replace(scores, tasks=tasks or scores.tasks)


def _whole(run: Run) -> str:
    """Reference of the original model that all nodes can resolve: for a registered model, the copy
    of its version in storage.
    """
    named, placement = run.model.backbone.path, run.placement
    if not named.startswith(SCHEME):
        return named
    tracking_uri = reachable_tracking_uri(placement.tracking_uri, placement.storage_path)
    pinned = pinned_reference(named, tracking_uri)
    place = join(_folder(run), pinned.removeprefix(SCHEME).replace("/", "-"))
    made_of = json.dumps({"registered": pinned, "tracking_uri": tracking_uri}).encode()
    folder = find_folder(pinned, tracking_uri)

    def save(output: Path) -> None:
        copytree(folder, output, dirs_exist_ok=True)

    upload_model(place, made_of, save)
    return place


def recovery(run: Run, label: str, reference: str, start: str) -> Run:
    """Return the run that trains one size, from the cut model's folder and with the original model
    as teacher.

    A stage that names teachers keeps them and its loss; another gets the whole model's vectors
    beside InfoNCE, as NV-Embed's re-training with distillation (arXiv 2405.17428, appendix A).

    Args:
        reference: of the whole model.

    Raises:
        ConfigError: the run takes no scores, or does not fit the model.
    """
    if not run.takes_scores:
        raise ConfigError(
            "the run has no tasks to compare the sizes of the model by; name tasks in "
            "evaluation.benchmarks or evaluation.own_sets"
        )
    config = check_loadable(resolve_model(reference))
    model = config.model_dump(mode="json")
    for name in config.parts:
        model[name] |= {"path": start}
    model["backbone"] |= {"dtype": run.model.backbone.dtype, "num_layers": None}
    for role, length in run.model.max_lengths.items():
        model[f"{role}_max_length"] = min(length, config.max_lengths[role])
    longest = max(model["query_max_length"], model["document_max_length"])
    teacher = Teacher(teacher=reference, max_length=longest)
    values = run.model_dump(mode="json")
    # MLflow takes no dots in the name of a registered model.
    values |= {"name": f"{run.name}-{label}".replace(".", "_"), "model": model}
    values["stages"] = [_distilling(stage, teacher) for stage in run.stages]
    # Its start is cut, so that no mixture with it is wanted; sizes are compared on own data.
    compared = {"before_training": True, "baselines": [reference], "guard": None}
    values["evaluation"] = without_general(run).model_dump(mode="json") | compared
    return parse(Run, values)


def _distilling(stage: StageConfig, teacher: Teacher) -> dict[str, Any]:
    values = stage.model_dump(mode="json")
    if stage.teachers:
        return values
    temperature = getattr(stage.loss, "temperature", None)
    given = {} if temperature is None else {"infonce_temperature": temperature}
    loss = VectorDistillation(**given)
    return values | {
        "loss": loss.model_dump(mode="json"),
        "teachers": [teacher.model_dump(mode="json")],
    }


def _texts_of(run: Run, files: str | None, languages: Sequence[str]) -> list[CalibrationText]:
    """Read the texts whose tokens are kept: from given files, or the training data with its
    instructions.

    Raises:
        ConfigError: no row is of a language that is asked for.
    """
    if files is not None:
        return [CalibrationText(text) for text in documents_in(files, "text")]
    found: dict[CalibrationText, None] = {}
    rows: Counter[str | None] = Counter()
    names = [dataset.name for dataset in run.used_datasets]
    for folders in do_steps(data_of(run), names, "records").values():
        for part in folders[-1].parts:
            for record in read_records(part.path):
                rows[record.language] += 1
                if languages and record.language not in languages:
                    continue
                found[CalibrationText(record.query, "query", record.query_instruction)] = None
                for text in (*record.positives, *(one.text for one in record.negatives)):
                    found[CalibrationText(text, "document", record.document_instruction)] = None
    if missing := [one for one in languages if one not in rows]:
        rows_text = ", ".join(f"{one or 'none'} ({count:,})" for one, count in rows.most_common())
        raise ConfigError(
            f"--language {missing[0]}: no row of the training data is in this language; the "
            f"languages of the rows are {rows_text}. Name one of these languages, or name the "
            "column of languages by data.datasets.NAME.source.language=COLUMN"
        )
    return list(found)


def _folder(run: Run) -> str:
    return join(run.placement.storage_path, "sizes", run.name)


def sizes_tables(members: Sequence[Scored[Member]]) -> list[Table]:
    """Build the report's tables of all sizes."""
    title = f"Sizes of {members[0].made.place}"
    return report_tables(title, members, lambda member: member.figures)


def write_report(run: Run, members: Sequence[Scored[Member]]) -> str:
    """Write `sizes.md` and `sizes.csv`; return their folder in storage."""
    folder = _folder(run)
    for name, data in report_files("sizes", sizes_tables(members)).items():
        write_atomic(join(folder, name), data)
    return folder
