"""Data jobs (prepare, mine, cluster), from their arguments to finished folders."""

import argparse
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayembed.assets.storage import check_writable
from rayembed.config.data_run import DataRun, data_of
from rayembed.config.data_steps import data_steps
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.pipeline.job import Job, JobContext, Reader, named_or_read, option
from rayembed.pipeline.storage import placed
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed.recipes.data_recipes import data_recipe_names, get_data_recipe

if TYPE_CHECKING:
    from rayembed.data.engine.artifacts import DatasetArtifact

OWN_PAIRS = "pairs"
"""The recipe of a job that names none: the user's own pairs."""


@dataclass(frozen=True)
class DataRequest:
    """Settings of a data job, with the names of the data sets that it prepares."""

    run: DataRun
    names: tuple[str, ...]


def data_job(until: str, example: str = "") -> Job[DataRequest]:
    """Make the job that prepares data sets up to the given step, such as mining.

    Its reader refuses an unknown data set, and data sets of which none asks for the step.

    Args:
        until: folder of the step.
        example: arguments of a dry run that ends with it.
    """

    def read(args: argparse.Namespace) -> DataRequest:
        run = _READER(args)
        return DataRequest(run, _chosen(run, args.datasets, until))

    def work(request: DataRequest, _: JobContext) -> None:
        do_steps(request.run, request.names, until)

    return Job(
        options=(*_READER.options, _DATASETS),
        read=read,
        run=work,
        lists=("data recipes and the catalogue", _list),
        shows=("the resolved run", "what it does", _show),
        example=example,
    )


def _chosen(run: DataRun, names: str | None, until: str) -> tuple[str, ...]:
    """Names of the data sets to prepare: the given ones, or all that configure the step."""
    known = {dataset.name: dataset for dataset in run.data.datasets}
    given = [name.strip() for name in names.split(",")] if names else list(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"--datasets: no data set {name!r}; {nearest(name, known)}")
    if until == "records":
        return tuple(given)
    step = next(step for step in data_steps() if step.folder == until)
    asking = tuple(name for name in given if getattr(known[name], step.kind) is not None)
    if not asking:
        path = f"data.datasets.{given[0]}.{step.kind}"
        example = " ".join(f"--set {path}.{assignment}" for assignment in step.least)
        raise ConfigError(
            f"no data set of the run {run.name!r} configures this step: {path} is null; set it, "
            f"for instance {example}"
        )
    return asking


def _names() -> list[str]:
    """Names of the data recipes, and of training recipes, whose data sets can be prepared, too."""
    return [*data_recipe_names(), *recipe_names()]


def _base(recipe: str) -> DataRun:
    """Return the data run for a recipe's name or a YAML file; of training runs, only the data
    settings.
    """
    names = _names()

    def get(name: str) -> DataRun:
        if name not in names:
            raise ConfigError(f"no recipe {name!r}; {nearest(name, names)}")
        return get_data_recipe(name) if name in data_recipe_names() else data_of(get_recipe(name))

    return named_or_read(recipe, names, get, DataRun.read)


def _list(context: JobContext) -> None:
    from rayembed.pipeline.data.tables import print_catalogue

    print_catalogue(context.out)


def _show(request: DataRequest, context: JobContext) -> None:
    from rayembed.pipeline.data.tables import print_data_run

    run = request.run
    context.out.write(f"# data run {run.name}, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    context.out.flush()
    print_data_run(run, request.names, context.err)


_DATASETS = option("--datasets A,B", "prepare only these data sets of the recipe")

_READER = Reader(
    kind=DataRun,
    base=_base,
    recipe="a data recipe, a training recipe (its data), or a file that --dry-run printed; "
    f"{OWN_PAIRS}: one file with a query and a positive a row",
    default=OWN_PAIRS,
    names=_names,
    examples="data sets go by their name, as in data.datasets.pairs.source.path=pairs.jsonl",
)

run_prepare_job = data_job("records")
run_mine_job = data_job("mined", "--recipe nvembed-quickstart")
run_cluster_job = data_job("clustered", "--recipe cde-quickstart")


def do_steps(
    run: DataRun, names: Collection[str], until: str
) -> "dict[str, list[DatasetArtifact]]":
    """Prepare the data sets, print their table, and return the finished folders.

    Everything that a user can get wrong is checked before a worker starts.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    # Ray and torch, which the settings and a dry run need not.
    from rayembed.data.prepare import prepare_datasets
    from rayembed.data.sources.check import check_sources
    from rayembed.pipeline.checks.model import check_teachers
    from rayembed.pipeline.checks.network import check_endpoints
    from rayembed.pipeline.data.tables import print_prepared
    from rayembed.pipeline.run.runtime import runtime_of

    run = placed(run)
    check_writable(run.placement.storage_path)
    named = [dataset for dataset in run.data.datasets if dataset.name in names]
    check_endpoints(named, run.placement.storage_path)
    if until != "records":
        check_teachers(named)
    sources = check_sources(run, names)
    runtime = runtime_of(run.placement)
    runtime.start()
    done = prepare_datasets(run, runtime.data_context(run), names, until, sources)
    print_prepared(run, done)
    return done
