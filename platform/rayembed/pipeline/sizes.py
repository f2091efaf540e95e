"""A family of sizes of one model: each cut from it, trained with it as teacher, and scored."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import check_writable, join, write_atomic
from rayembed.compression.contract import CalibrationText, Source
from rayembed.compression.prune import empty_model
from rayembed.config.compared import without_general
from rayembed.config.data_run import data_of
from rayembed.config.document import fingerprint
from rayembed.config.mining import Teacher
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.parts import read_records
from rayembed.errors import ConfigError
from rayembed.evaluation.rayembed_spec import find_folder
from rayembed.evaluation.registered_folder import pinned_reference
from rayembed.evaluation.tables import ScoreTable
from rayembed.losses.vector_distillation import VectorDistillation
from rayembed.models.files import weights_fingerprint
from rayembed.models.layers import layers_of
from rayembed.models.load import check_loadable
from rayembed.pipeline.at_hand import check_at_hand
from rayembed.pipeline.corpus_job import documents_in
from rayembed.pipeline.data_steps import do_steps
from rayembed.pipeline.family import Family, Size
from rayembed.pipeline.run_scorer import baseline_name
from rayembed.pipeline.storage import placed
from rayembed.pipeline.train import train
from rayembed.progress import doing
from rayembed.registry.registered_model import SCHEME
from rayembed.registry.tracking_uri import reachable_tracking_uri
from rayembed.tables import Cell, Table, show
from rayembed.training.export import upload_model

logger = logging.getLogger(__name__)

_MEGABYTE = 1e6

WHOLE = "all"
"""Label of the model that the others are cut from."""


@dataclass(frozen=True)
class Member:
    """One model of the family."""

    label: str
    folder: Path
    """On this machine."""
    place: str
    """In storage."""
    cut: float | None = None
    """Mean score before it was trained; None of the whole model."""
    score: float | None = None
    """Mean score of the finished model; None where a task has none."""

    @cached_property
    def facts(self) -> tuple[int, int, int, int]:
        """Layers and tokens of the backbone, parameters, and bytes of the folder."""
        model = empty_model(self.folder)
        backbone = model.parts["backbone"]
        return (
            len(layers_of([backbone])),
            backbone.get_input_embeddings().num_embeddings,
            sum(parameter.numel() for parameter in model.parameters()),
            sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()),
        )


def make_sizes(family: Family) -> list[Member]:
    """Cut, train and score each size; what is there already is not made again.

    The family's run has data, stages, scores and placement of each size's training; the settings
    of the whole model take the place of its model's.

    Returns:
        The whole model, then each size in its order.

    Raises:
        RayembedError: what cannot be done, before anything is trained.
    """
    run, sizes = placed(family.run), family.sizes
    check_writable(run.placement.storage_path)
    reference = _whole(run)
    folder = resolve_model(reference)
    for size in sizes:
        for way in size.ways:
            way.check(folder)
        check_at_hand(recovery(run, size.label, reference, str(folder)))
    known: list[CalibrationText] = []
    if any(way.needs_texts for size in sizes for way in size.ways):
        known = _texts_of(run, family)
    whole = Member(WHOLE, folder, reference)
    members = []
    for size in sizes:
        with doing(f"cutting {size.label}"):
            start = _cut(run, size, folder, known)
        outcome = train(recovery(run, size.label, reference, start))
        table = outcome.table
        assert table is not None  # a run without scores was refused
        last = [label for label in table.rows if label.startswith("stage ")][-1]
        place = outcome.model_folder
        found = resolve_model(place)
        cut, score = _mean(table, "untrained"), _mean(table, last)
        members.append(Member(size.label, found, place, cut, score))
        whole = Member(WHOLE, folder, reference, None, _mean(table, baseline_name(reference)))
        # After each size: what is done is seen, though a later one may fail.
        write_report(run, [whole, *members])
    return [whole, *members]


def _whole(run: Run) -> str:
    """Reference of the whole model that every node can resolve: of a registered one, the version's
    copy in storage.
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
    """The run that trains a size: from its cut folder, with the whole model as teacher.

    A stage that names teachers keeps them and its loss; another gets the whole model's vectors
    beside InfoNCE, as NV-Embed's re-training with distillation (arXiv 2405.17428, appendix A).

    Args:
        reference: of the whole model.

    Raises:
        ConfigError: the run takes no scores, or does not fit the model.
    """
    if not run.takes_scores:
        raise ConfigError(
            "the run takes no scores, by which sizes are compared; name tasks in "
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


def _texts_of(run: Run, family: Family) -> list[CalibrationText]:
    """The texts whose tokens are kept: of files, or of the training data with its instructions.

    Raises:
        ConfigError: no row is of a language that is asked for.
    """
    if family.texts is not None:
        return [CalibrationText(text) for text in documents_in(family.texts, "text")]
    found: dict[CalibrationText, None] = {}
    rows: Counter[str | None] = Counter()
    names = {name for stage in run.stages for name in stage.datasets}
    for folders in do_steps(data_of(run), names, "records").values():
        for part in folders[-1].parts:
            for record in read_records(part.path):
                rows[record.language] += 1
                if family.languages and record.language not in family.languages:
                    continue
                found[CalibrationText(record.query, "query", record.query_instruction)] = None
                for text in (*record.positives, *(one.text for one in record.negatives)):
                    found[CalibrationText(text, "document", record.document_instruction)] = None
    if missing := [one for one in family.languages if one not in rows]:
        told = ", ".join(f"{one or 'none'} ({count:,})" for one, count in rows.most_common())
        raise ConfigError(
            f"--language {missing[0]}: no row of the training data is in it; its rows are in "
            f"{told}. Name one of these, or say by data.datasets.NAME.source.language=COLUMN what "
            "language rows are in"
        )
    return list(found)


def _cut(run: Run, size: Size, folder: Path, texts: Sequence[CalibrationText]) -> str:
    """Folder in storage of a size before it is trained, made unless it is there."""
    made_of: dict[str, Any] = {
        "ways": [way.model_dump(mode="json") for way in size.ways],
        "weights": weights_fingerprint(folder),
    }
    if any(way.needs_texts for way in size.ways):
        made_of["texts"] = fingerprint(texts)
    place = join(_folder(run), f"{size.label}-{fingerprint(made_of)[:8]}")

    def save(output: Path) -> None:
        with TemporaryDirectory(prefix="sizes-") as scratch:
            source = folder
            for number, way in enumerate(size.ways, start=1):
                last = number == len(size.ways)
                target = output if last else Path(scratch) / str(number)
                way.compress(Source(source, texts), target)
                source = target

    upload_model(place, json.dumps(made_of, indent=1, sort_keys=True).encode(), save)
    return place


def _mean(table: ScoreTable, label: str) -> float | None:
    """Mean over the own tasks, or over all where none is own."""
    tasks = next(iter(table.kinds.values()), [])
    return table.mean(label, tasks)


def _folder(run: Run) -> str:
    return join(run.placement.storage_path, "sizes", run.name)


def sizes_table(members: Sequence[Member]) -> Table:
    """A row for each member: what it has, what it takes, what it scores."""
    whole = members[0].score
    rows = []
    for member in members:
        layers, tokens, parameters, size = member.facts
        kept = f"{member.score / whole:.1%}" if member.score is not None and whole else ""
        rows.append(
            [
                member.label,
                str(layers),
                f"{tokens:,}",
                Cell(parameters / 1e6, digits=2),
                Cell(size / _MEGABYTE, digits=1),
                Cell(member.cut, digits=4),
                Cell(member.score, digits=4),
                kept,
            ]
        )
    heads = ["size", "layers", "tokens", "M parameters", "MB", "cut", "score", "of the whole"]
    return Table(heads, rows, title=f"Sizes of {members[0].place}", align="lr")


def write_report(run: Run, members: Sequence[Member]) -> str:
    """Folder in storage of `sizes.md` and `sizes.csv`."""
    folder, table = _folder(run), sizes_table(members)
    write_atomic(join(folder, "sizes.md"), show(table, "markdown").encode())
    write_atomic(join(folder, "sizes.csv"), show(table, "csv").encode())
    return folder
