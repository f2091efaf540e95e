"""Check a run without the network: names, files, models, free CPUs and GPUs of this
machine.

Imports neither torch nor transformers, mteb or Ray, so that a misspelt path is told in a second.
What takes a download, or the model itself, is checked by `pipeline.checks`.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rayembed.assets.folder_formats import PROOF_FOLDER
from rayembed.assets.hub import parse_hub_reference
from rayembed.assets.package_index import parse_package_reference
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.config.credentials import check_address
from rayembed.config.data import DatasetConfig
from rayembed.config.evaluation import BM25
from rayembed.config.idle import idle_clusters
from rayembed.config.named_benchmarks import further_benchmark_names, refuse_job_benchmarks
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.config.run_evaluation import MtebValidation
from rayembed.config.settings import changed, parse
from rayembed.config.stage import StageConfig
from rayembed.data.epochs import ExpectedRecords, expected_records, many_passes
from rayembed.data.epochs import resolve as resolve_run
from rayembed.data.sources.check import Head, is_here, look, with_source_path
from rayembed.data.sources.names_beside import missing
from rayembed.data.sources.tasks import accept
from rayembed.data.sources.unread import check_unread
from rayembed.errors import AssetError, ConfigError, PlacementError, RayembedError
from rayembed.evaluation.mteb_names import check_names, check_task
from rayembed.evaluation.own_data import find_files
from rayembed.machine.cores import num_cores
from rayembed.training.memory.capacity import Node, check_capacity


@dataclass
class AtHand:
    """Results of the checks on this machine: problems, warnings, missing files, numbers of rows."""

    run: Run
    """The run after `data.epochs.resolve`, unless resolving it is among the problems."""
    heads: dict[str, Head] = field(default_factory=dict)
    """Head of each data set whose files are on this machine."""
    problems: list[str] = field(default_factory=list)
    """Errors for which the run would be refused on any machine."""
    absent: dict[str, str] = field(default_factory=dict)
    """Data sets without files on this machine, with the reason; another `data.root` may
    have them."""
    room: str | None = None
    """Reason why the workers do not fit on this machine; a cluster may hold them."""
    warnings: list[str] = field(default_factory=list)
    """Problems that do not stop the run."""

    def expected_records(self, stage: StageConfig) -> int | None:
        """Estimate the number of records that the stage trains on; None if unknown."""
        heads = [self.heads.get(name) for name in stage.datasets]
        known = [None if head is None else head.trained_records for head in heads]
        return None if None in known else sum(count or 0 for count in known)


def check_at_hand(run: Run, expected: ExpectedRecords = expected_records) -> AtHand:
    """Check everything that this machine can check of a run; raise on any problem.

    Args:
        expected: gives the steps of stages with `epochs`.

    Raises:
        ConfigError: what the run is refused for, a line for each.
    """
    found = look_at(run, expected)
    told = [*found.problems, *found.absent.values(), *([found.room] if found.room else [])]
    if told:
        raise ConfigError("\n".join(told))
    return found


def look_at(run: Run, expected: ExpectedRecords = expected_records) -> AtHand:
    """Check everything that this machine can check of a run, and return the results without
    raising.
    """
    found = AtHand(run, warnings=idle_clusters(run))

    def settle() -> None:
        found.run = resolve_run(run, expected)

    def ask(check: Callable[[], None]) -> None:
        try:
            check()
        except RayembedError as error:
            if str(error) not in found.problems:
                found.problems.append(str(error))

    ask(settle)
    run = found.run
    ask(partial(_check_names, run))
    for dataset in run.used_datasets:
        ask(partial(_look_at_source, run, dataset, found))
    for stage in run.stages:
        ask(partial(_check_rows, stage, found))
    for setting, reference in models_of(run):
        ask(partial(_check_model, setting, reference))
    ask(partial(_check_sets, run))
    ask(partial(_check_number_types, run))
    ask(partial(_check_storage, run.placement.storage_path))
    found.warnings += unusual(run)
    for stage in run.stages:
        records = found.expected_records(stage)
        if stage.epochs is None and records:
            passes = stage.steps * stage.batch.global_pairs / records
            found.warnings += many_passes(stage.name, stage.length, records, passes, "about ")
    try:
        check_room(run.placement)
    except PlacementError as error:
        if run.placement.runtime == "local":
            found.problems.append(str(error))
        else:
            found.room = str(error)
    return found


def _check_names(run: Run) -> None:
    check_names("evaluation", run.scores, further_benchmark_names())
    refuse_job_benchmarks(run.evaluation.benchmarks)
    data = None if run.evaluation.validation is None else run.evaluation.validation.data
    if isinstance(data, MtebValidation):
        for name in data.tasks:
            check_task("evaluation.validation.data.tasks", name)


def _look_at_source(run: Run, dataset: DatasetConfig, found: AtHand) -> None:
    if not run.data.root and (lost := _not_here(dataset)):
        found.absent[dataset.name] = lost
        return
    if not is_here(dataset, run.data.root):
        _check_other_source(run, dataset)
        return
    head = found.heads[dataset.name] = look(dataset, run.data.root)
    check_unread(run, dataset, head.unread)
    if head.records is None:
        return
    if head.whole:
        counts = {"rows_in": head.read, "records_made": head.records, "rejected": head.rejected}
        accept(head.dataset, {**counts, "examples": head.examples})
        return
    share = getattr(dataset.source, "max_rejected_share", 1.0)
    if head.bad > share * head.read:
        found.warnings.append(
            f"data.datasets.{dataset.name}: {head.bad:,} of the first {head.read:,} rows give no "
            f"record ({', '.join(head.rejected)}), more than source.max_rejected_share "
            f"{share:g}; for instance {head.examples[0]['row']}"
        )


def _not_here(dataset: DatasetConfig) -> str | None:
    """Explain which relative path of a data set does not exist on this machine; None if all
    exist.
    """
    for setting, path in dataset.source.paths.items():
        if (
            "*" not in path
            and "://" not in path
            and not Path(path).is_absolute()
            and not Path(path).exists()
        ):
            at = f"data.datasets.{dataset.name}.source.{setting}"
            return (
                f"{at} = {path!r}: {missing(path)} (set it to where your rows lie, or data.root to "
                "the folder that relative paths are taken from)"
            )
    return None


def _check_other_source(run: Run, dataset: DatasetConfig) -> None:
    source, at = dataset.source, f"data.datasets.{dataset.name}.source"
    source.check_names(at)
    whole = with_source_path(dataset, run.data.root)
    if source.has_records and not any("://" in path for path in whole.source.paths.values()):
        try:
            whole.source.check(whole)
        except RayembedError as error:
            raise type(error)(f"{at}: {error}") from error
    for setting, path in source.paths.items():
        _check_form(f"{at}.{setting}", path)


def _check_rows(stage: StageConfig, found: AtHand) -> None:
    """Raise if a stage's data sets have too few records to fill a batch."""
    pairs, setting = stage.batch.global_pairs, f"stages.{stage.name}.batch.global_pairs"
    most = {name: _most(found.heads[name]) for name in stage.datasets if name in found.heads}
    known = {name: rows for name, rows in most.items() if rows is not None}
    if len(known) < len(stage.datasets):
        return
    total, each = sum(known.values()), list(known.values())
    if stage.batch.policy == "homogeneous" and max(each) < pairs:
        raise ConfigError(
            f"{setting} is {pairs} and the batch policy 'homogeneous' fills each batch from "
            f"one data set, but no data set has that many records ({_counts(known)}); lower "
            f"{setting}, add rows or use the policy 'blended'"
        )
    if total < pairs:
        raise ConfigError(
            f"{setting} is {pairs}, but the stage's data sets have {total} records in all "
            f"({_counts(known)}), fewer than one global batch; lower {setting} or add rows"
        )
    if stage.batch.policy == "blended" and stage.batch.temperature is None:
        weights = sum(stage.datasets.values())
        for name, weight in stage.datasets.items():
            needed = min(pairs, math.ceil(weight / weights * pairs - 1e-9))
            if known[name] < needed:
                raise ConfigError(
                    f"{setting} is {pairs}, so a batch takes up to {needed} records of the "
                    f"data set {name!r}, but the data set has only {known[name]}; lower "
                    f"{setting}, lower the weight stages.{stage.name}.datasets.{name}, or "
                    "add rows"
                )


def _most(head: Head) -> int | None:
    """Maximum number of records of a data set that training uses; None if unknown."""
    drawn = head.dataset.num_samples
    counts = [count for count in (head.most_records, drawn) if count is not None]
    return min(counts, default=None)


def _counts(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in rows.items())


def models_of(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (setting, reference) for every model that the run loads."""
    for name, reference in run.model.parts.items():
        yield f"model.{name}.path", reference
    for dataset in run.used_datasets:
        for step in dataset.steps:
            for name, reference in step.models.items():
                yield f"data.datasets.{dataset.name}.{step.kind}.{name}", reference
    for stage in run.stages:
        for place, teacher in enumerate(stage.teachers):
            yield f"stages.{stage.name}.teachers.{place}.teacher", teacher.teacher
        if stage.hidden_states is not None:
            yield f"stages.{stage.name}.hidden_states.teacher", stage.hidden_states.teacher
    if run.takes_scores:
        for place, baseline in enumerate(run.evaluation.baselines):
            if baseline != BM25:
                yield f"evaluation.baselines.{place}", baseline
        if run.evaluation.reranker is not None:
            yield "evaluation.reranker.model", run.evaluation.reranker.model


def _check_model(setting: str, reference: str) -> None:
    """Raise if a model's reference is malformed or its local folder holds no model."""
    _check_form(setting, reference)
    if "://" in reference or reference.startswith("models:/"):
        return
    try:
        if resolve(reference).is_file() and reference.lower().endswith(".gguf"):
            return
        _check_folder(resolve_model(reference))
    except AssetError as error:
        raise AssetError(f"{setting} cannot be used: {error}") from None


def _check_form(setting: str, reference: str) -> None:
    """Raise if an `hf://` or `pypi://` reference is malformed."""
    read = {"hf": parse_hub_reference, "pypi": parse_package_reference}
    scheme = reference.partition("://")[0]
    if "://" in reference and scheme in read and "*" not in reference:
        try:
            read[scheme](reference)
        except AssetError as error:
            raise AssetError(f"{setting} cannot be used: {error}") from None


def _check_folder(folder: Path) -> None:
    """Raise if a model's folder has unreadable settings or no weights."""
    for path in folder.glob("*.json"):
        if path.name in ("config.json", "modules.json", "rayembed.json"):
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise AssetError(
                    f"the file {str(path)!r} is broken: {error}; copy it again"
                ) from None
    files = (path for path in folder.rglob("*") if path.parent.name != PROOF_FOLDER)
    weights = [path for path in files if path.suffix in (".safetensors", ".bin")]
    if not weights:
        held = ", ".join(sorted(item.name for item in folder.iterdir()))
        raise AssetError(
            f"no weights in {str(folder)!r}, which holds {held}; expected *.safetensors or "
            "pytorch_model.bin"
        )
    if empty := [path.name for path in weights if not path.stat().st_size]:
        raise AssetError(f"the weights {empty[0]} in {str(folder)!r} are empty; copy them again")


def _check_sets(run: Run) -> None:
    """Raise if files of an own evaluation set do not exist."""
    places = [
        (f"evaluation.own_sets.{own.name}", own.path, own.split)
        for own in run.scores.own_sets
        if own.kind == "retrieval" and not own.languages
    ]
    data = None if run.evaluation.validation is None else run.validation_scores
    for own in () if data is None else data.own_sets:
        if own.kind == "retrieval" and not own.languages:
            places.append(("evaluation.validation.data", own.path, own.split))
    for setting, path, split in places:
        if "://" not in path:
            try:
                find_files(path, split)
            except RayembedError as error:
                raise type(error)(f"{setting}: {error}") from None


def _check_storage(path: str) -> None:
    """Raise if a storage folder on this machine cannot be created or written; nothing is
    created.
    """
    if "://" in path:
        return
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    what = "is a file" if not place.is_dir() else "may not be written"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise PlacementError(
            f"placement.storage_path = {path!r} cannot be used: {str(place)!r} {what}; choose a "
            "folder that this machine may write to, or an address of object storage"
        )


_USUAL: tuple[tuple[str, str, float, float], ...] = (
    ("optimizer.learning_rate", "1e-6 to 1e-2", 1e-9, 1.0),
    ("loss.temperature", "0.01 to 0.1", 1e-4, 2.0),
    ("steps", "100 to 100,000", 1, 10**7),
)
"""Settings of a stage: what is usual, and what is lower or higher than anyone can mean."""


def unusual(run: Run) -> list[str]:
    """Make warnings about values of settings that are allowed but rarely intended."""
    found = []
    for stage in run.stages:
        for path, usual, low, high in _USUAL:
            value: Any = stage
            for name in path.split("."):
                value = getattr(value, name, None)
            if isinstance(value, int | float) and not low <= value <= high:
                at = f"stages.{stage.name}.{path}"
                found.append(f"{at} is {value:g}; usual ones are {usual}")
    tokens = run.placement.micro_batch_tokens
    longest = max(run.model.query_max_length, run.model.document_max_length)
    if tokens is not None and tokens < longest:
        found.append(
            f"placement.micro_batch_tokens is {tokens}, less than one text of {longest} tokens: "
            "such texts go alone; usual ones are 2,048 to 65,536"
        )
    return found


def _check_number_types(run: Run) -> None:
    """Raise if the settings contradict a number type that `model.backbone.dtype=auto` may
    choose.
    """
    if run.model.backbone.dtype != "auto":
        return
    for dtype in ("bfloat16", "float32"):
        backbone = changed(run.model.backbone, dtype=dtype)
        try:
            parse(type(run), {**dict(run), "model": changed(run.model, backbone=backbone)})
        except ConfigError as error:
            raise ConfigError(
                f"model.backbone.dtype=auto means {dtype} on some machines, where this run is "
                f"invalid: {error}"
            ) from None


def check_room(placement: Placement) -> None:
    """Raise if all workers must run on this machine and need more CPUs or GPUs than it has.

    Raises:
        PlacementError: as `check_capacity`.
    """
    named = os.environ.get("RAY_ADDRESS", "local") or "local"
    check_address(named, "the environment variable RAY_ADDRESS")
    ray: Any = sys.modules.get("ray")
    elsewhere = named != "local" or (ray is not None and ray.is_initialized())
    if placement.runtime != "local" and (elsewhere or placement.wait_for_nodes_seconds):
        return
    check_capacity(placement, [_this_machine()])


def _this_machine() -> Node:
    return {"CPU": float(num_cores()), "GPU": float(_num_gpus())}


def _num_gpus() -> int:
    """Count this machine's GPUs without importing torch; the count may be too high, not too low."""
    if any(Path(name).exists() for name in ("/dev/dxg", "/dev/kfd")):  # WSL, AMD
        return 1 << 10
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len([p for p in Path("/dev").glob("nvidia*") if p.name[len("nvidia") :].isdecimal()])
    return devices if shown is None else min(devices, len([n for n in shown.split(",") if n]))
