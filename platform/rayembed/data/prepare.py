"""Data preparation: turn settings into records and batch plans, in folders named by a hash of their
inputs.

    storage/data/converted/<data set>-<fingerprint>/   records of all rows, where some are held out
    storage/data/held_out/<data set>-<fingerprint>/    kept from training, to be scored
    storage/data/records/<data set>-<fingerprint>/     converted, cleaned, sampled
    storage/data/filtered/<data set>-<fingerprint>/    consistent
    storage/data/mined/<data set>-<fingerprint>/       with hard negatives
    storage/data/repaired/<data set>-<fingerprint>/    without false negatives
    storage/data/answers/<model's settings>/           answers of a language model that judged
    storage/data/clustered/<data set>-<fingerprint>/   in batches of similar pairs
    storage/data/vectors/<teacher's settings>/         float16 vectors, reused by all runs
    storage/data/teacher_vectors/<stage>-<fingerprint> where those of a stage's texts lie
    storage/plans/<stage>-<fingerprint>/               the batch plan, audit.md

A folder is finished when its manifest exists, which is written last; a finished folder is reused,
an unfinished one is resumed. Independent of Ray.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rayembed.assets.storage import file_name, join
from rayembed.config.data import DatasetConfig
from rayembed.config.data_run import DataRun, data_of
from rayembed.config.data_steps import data_steps, step_folders
from rayembed.config.document import fingerprint
from rayembed.config.run import Run
from rayembed.data.audit import write_folder_audit
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.here import release_models
from rayembed.data.engine.parts import are_graded
from rayembed.data.held_out.part import make_part
from rayembed.data.plan.audit import plan_warnings, write_audit
from rayembed.data.plan.batch_plan import CODE_VERSION, BatchPlan
from rayembed.data.plan.order import PlanConfig, columns_for
from rayembed.data.plan.write import write_plan
from rayembed.data.sources.check import check_sources
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.file_rows import ResolvedDataset
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.sources.unread import check_unread, unread_warning
from rayembed.data.vectors.store import make_store
from rayembed.errors import DataError

log = logging.getLogger(__name__)


def prepare(
    run: Run, context: PipelineContext, checked: Sequence[ResolvedDataset] = ()
) -> dict[str, str]:
    """Prepare the data of all stages of a training run; return the folder of each stage's batch
    plan.

    Models that this process has loaded for it are released.

    Args:
        checked: data sets whose sources were found already; the others' are looked for here.

    Raises:
        ConfigError: settings that contradict each other or the columns of a file.
        DataError: a source is missing, empty or has too many bad rows; a stage cannot be planned.
    """
    used = [dataset.name for dataset in run.used_datasets]
    sources = check_sources(data_of(run), used, checked)
    for one in sources:
        check_unread(run, one.dataset, one.unread)
    steps = prepare_datasets(data_of(run), context, used, sources=sources)
    prepared = {name: done[-1] for name, done in steps.items()}
    _check_grades(run, prepared)
    plans: dict[str, BatchPlan] = {}
    for stage in run.stages:
        chains = {name: steps[name] for name in stage.datasets}
        stores = [
            make_store(context, stage.name, chains, stage.batch.num_negatives, teacher)
            for teacher in stage.teachers
        ]
        config = PlanConfig(
            weights=stage.datasets,
            global_pairs=stage.batch.global_pairs,
            num_negatives=stage.batch.num_negatives,
            num_steps=stage.steps,
            epochs=stage.epochs,
            seed=run.seed,
            in_batch_negatives=stage.batch.in_batch_negatives,
            key=stage.name,
            policy=stage.batch.policy,
            temperature=stage.batch.temperature,
            columns=columns_for(stage.loss),
            teachers=tuple(file_name(store.folder) for store in stores),
            num_positives=stage.batch.num_positives,
        )
        inputs = {name: prepared[name].fingerprint for name in stage.datasets}
        named = fingerprint({**config.values(), "inputs": inputs, "code": CODE_VERSION})
        folder = join(context.storage, "plans", f"{stage.name}-{named}")
        parts = {name: prepared[name].parts for name in stage.datasets}
        batch_pairs = {
            name: int(prepared[name].manifest["batch_pairs"])
            for name in stage.datasets
            if "batch_pairs" in prepared[name].manifest
        }
        plan = write_plan(
            folder,
            parts,
            config,
            inputs=inputs,
            batch_pairs=batch_pairs,
            execute=context.execute,
        )
        write_audit(plan, {name: prepared[name].manifest for name in stage.datasets}, parts)
        plans[stage.name] = plan
    for plan in plans.values():
        for warning in plan_warnings(plan):
            log.warning("%s", warning)
    release_models()
    if unused := [d.name for d in run.data.datasets if d.name not in used]:
        log.warning("no stage uses the data sets %s; they are not prepared", ", ".join(unused))
    return {name: plan.folder for name, plan in plans.items()}


def prepare_datasets(
    run: DataRun,
    context: PipelineContext,
    names: Collection[str] | None = None,
    until: str | None = None,
    sources: Sequence[ResolvedDataset] | None = None,
) -> dict[str, list[DatasetArtifact]]:
    """Run the preparation steps of each data set; return the folder of each step in order, the last
    one being the result.

    Steps that a data set's settings do not ask for are left out.

    Args:
        names: data sets to prepare; None: all.
        until: folder of the last step; None: all are done.
        sources: what `check_sources` found; None: it is looked for here.

    Raises:
        ConfigError, DataError: as `prepare`.
    """
    # What can be wrong is found before what takes long: all files, then all rows, then teachers.
    chosen = [d for d in run.data.datasets if names is None or d.name in names]
    sources = check_sources(run, names) if sources is None else sources
    sources = [checked.dataset.source.written(context, checked) for checked in sources]
    parts = {checked.dataset.name: make_part(context, checked) for checked in sources}
    found = [part for part in parts.values() if part is not None]
    held_out = HeldOut(texts=frozenset[int]().union(*(part.texts for part in found)))
    done: dict[str, list[DatasetArtifact]] = {}
    for checked in sources:
        name, part = checked.dataset.name, parts[checked.dataset.name]
        banned = held_out if part is None else replace(held_out, rows=part.rows)
        own = None if part is None else part.artifact
        done[name] = [make_records(context, checked, banned, own)]
    for part in found:
        write_folder_audit(part.artifact)
    for folders in done.values():
        write_folder_audit(folders[-1])
    for dataset in chosen:
        _check_teachers_take(dataset, done[dataset.name][0])
    number = len(data_steps()) if until is None else step_folders().index(until)
    wanted = {step.kind for step in data_steps()[:number]}
    for dataset in chosen:
        folders = done[dataset.name]
        for step in dataset.steps:
            if step.kind in wanted:
                folders.append(step.make(context, dataset, folders[-1], held_out))
        for prepared in folders[1:]:
            write_folder_audit(prepared)
    for folders in done.values():
        if (unread := unread_warning(folders[0].manifest)) is not None:
            log.warning("%s", unread)
    return done


def _check_teachers_take(dataset: DatasetConfig, records: DatasetArtifact) -> None:
    """Raise if a teacher's step (filter, mining, clusters) would treat graded pairs of an earlier
    job as queries with positives.
    """
    if dataset.steps and dataset.source.has_records and are_graded(records.parts):
        step = dataset.steps[0].kind
        raise DataError(
            f"data set {dataset.name!r}: its records are graded pairs, which may be dissimilar, "
            f"but {step} treats every pair as a query and its positive; set "
            f"data.datasets.{dataset.name}.{step}=null"
        )


def _check_grades(run: Run, prepared: Mapping[str, DatasetArtifact]) -> None:
    """Raise when a loss would treat an earlier job's graded records as positives."""
    for stage in run.stages:
        if "similarity" in stage.loss.needs:
            continue
        for dataset in run.data.datasets:
            if (
                dataset.name in stage.datasets
                and dataset.source.has_records
                and are_graded(prepared[dataset.name].parts)
            ):
                raise DataError(
                    f"stage {stage.name!r}: records of the data set {dataset.name!r} are graded "
                    f"pairs, some of them dissimilar, but the loss {stage.loss.kind!r} would "
                    "treat all as positives; use a loss over graded pairs (cosent), or prepare "
                    "the records with a source of kind 'sts', which keeps only similar pairs"
                )
