"""Run the analyses of contextual embeddings, from arguments to a table, a plot and a sentence."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rayembed.assets.storage import check_writable, join
from rayembed.config.data import DatasetConfig
from rayembed.config.data_run import data_of
from rayembed.config.run import Run
from rayembed.config.settings import nearest
from rayembed.config.types import expanded_name
from rayembed.errors import ConfigError
from rayembed.pipeline.job import (
    Job,
    JobContext,
    Option,
    Reader,
    at_least,
    check_no_credentials,
    exit_code,
    names_in,
    option,
)
from rayembed.pipeline.run.training_job import base_run
from rayembed.pipeline.storage import placed
from rayembed.recipes.catalogue import recipe_names

RECIPE = "cde-quickstart"

FOLDER = "analysis"
"""Folder in storage for results of mteb and for tables."""

_BATCH_SIZES = (16, 64, 256)
_SMALLEST_CLUSTER = 8
_TASKS = ("WikiSentenceRetrieval", "WikiDescriptionRetrieval")


def analyse_batches(run: Run, job: JobContext) -> None:
    """Measure the difficulty of batches over sizes of clusters and of batches (CDE, Figure
    6).

    Raises:
        ConfigError: no data set with clusters, or sizes larger than the data.
    """
    from rayembed.data.engine.on_ray import ray_pipeline_context
    from rayembed.data.prepare import prepare_datasets
    from rayembed.data.sources.check import check_sources
    from rayembed.pipeline.checks.model import check_teachers
    from rayembed.pipeline.run.on_ray import connect
    from rayembed_papers.context.difficulty import Difficulty, measure_batches
    from rayembed_papers.context.report import deliver, difficulty_report

    args, output = job.args, _output(run, job, "batches")
    datasets = clustered_datasets(run, args.datasets)
    check_teachers(datasets)
    data, names = data_of(run), {dataset.name for dataset in datasets}
    check_writable(output)
    sources = check_sources(data, names)
    connect()
    context = ray_pipeline_context(data)
    # Clusters are made of the rows that the filter leaves; mining changes no pair.
    prepared = prepare_datasets(data, context, names, "filtered", sources)
    pairs = {name: sum(part.rows for part in done[-1].parts) for name, done in prepared.items()}
    cluster_sizes, batch_sizes = requested_sizes(
        args.cluster_sizes, args.batch_sizes, pairs, args.pairs
    )
    total: dict[int | None, dict[int, Difficulty]] = {}
    for dataset in datasets:
        found = measure_batches(
            context,
            dataset,
            prepared[dataset.name][-1],
            cluster_sizes=cluster_sizes,
            batch_sizes=batch_sizes,
            max_pairs=args.pairs,
            max_batches=args.batches,
        )
        for size, by_batch in found.items():
            kept = total.setdefault(size, {})
            for batch, one in by_batch.items():
                kept[batch] = kept[batch].with_more(one) if batch in kept else one
    deliver(difficulty_report(total), output, job.out)


def clustered_datasets(run: Run, names: str | None) -> list[DatasetConfig]:
    """Select the data sets with the given names (None: all) that are divided into clusters.

    Raises:
        ConfigError: an unknown name, or none has clusters.
    """
    known = {dataset.name: dataset for dataset in run.data.datasets}
    wanted = [name.strip() for name in names.split(",")] if names else list(known)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--datasets: no data set {name!r}; {nearest(name, known)}")
    found = [known[name] for name in wanted if known[name].clusters is not None]
    if not found:
        raise ConfigError(
            f"the run {run.name!r} has no clusters, because data.datasets.{wanted[0]}.clusters is "
            "null; use a recipe with clusters, or set a teacher for clusters, for instance --set "
            f"data.datasets.{wanted[0]}.clusters.teacher=hf://owner/model --set "
            f"data.datasets.{wanted[0]}.clusters.batch_pairs=64"
        )
    return found


def requested_sizes(
    cluster_sizes: Sequence[int] | None,
    batch_sizes: Sequence[int] | None,
    pairs: dict[str, int],
    most: int,
) -> tuple[list[int], list[int]]:
    """Return ascending sizes of clusters and of batches; without request, default sizes that fit
    the data.

    Args:
        pairs: of each data set.
        most: pairs that are taken of each.

    Raises:
        ConfigError: a size larger than the data.
    """
    smallest = min(pairs, key=lambda name: pairs[name])
    there = min(pairs[smallest], most)
    for flag, sizes in (("--cluster-sizes", cluster_sizes), ("--batch-sizes", batch_sizes)):
        if sizes and max(sizes) > there:
            raise ConfigError(
                f"{flag} {max(sizes)} is more than the {there} pairs of the data set "
                f"{smallest!r}; choose smaller sizes, or raise --pairs (now {most}) and the data "
                "set's num_samples"
            )
    powers = [2**power for power in range(2, there.bit_length())]
    clusters = [size for size in powers if _SMALLEST_CLUSTER <= size <= there // 4]
    batches = [size for size in _BATCH_SIZES if size <= there // 4]
    if not (cluster_sizes or clusters) or not (batch_sizes or batches):
        raise ConfigError(
            f"the data set {smallest!r} has only {there} pairs, too few to compare several sizes "
            "of clusters and batches; add rows"
        )
    return sorted(set(cluster_sizes or clusters)), sorted(set(batch_sizes or batches))


def analyse_sizes(run: Run, job: JobContext) -> None:
    """Score a model over the number of context documents (CDE, Figure 16).

    Raises:
        ArtifactError: a model that takes no context, or no model.
        ConfigError: more documents than the model takes or a task has, or an unknown task.
    """
    from rayembed.pipeline.run.on_ray import connect
    from rayembed_papers.context.report import deliver, size_report
    from rayembed_papers.context.sizes import (
        check_sizes,
        contextual_folder,
        documents_of,
        scores_by_size,
        tasks_of,
    )
    from rayembed_papers.measure_on_ray import measured_on_ray

    args, output = job.args, _output(run, job, "sizes")
    reference = args.model or trained_model(run)
    _, places = contextual_folder(reference)
    tasks = tasks_of(run, args.tasks)
    fewest = min(len(set(documents_of(task))) for task in tasks)
    sizes = args.sizes or default_sizes(min(places, fewest))
    check_sizes(sizes, places, tasks)
    check_writable(output)
    connect()
    found = measured_on_ray(
        scores_by_size,
        reference,
        run,
        sizes=sorted(set(sizes)),
        draws=args.draws,
        tasks=args.tasks,
        **_where(run),
    )
    deliver(size_report(found), output, job.out)


def default_sizes(most: int) -> list[int]:
    """Return 0, powers of two, and the maximum number of context documents."""
    return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), most]


def analyse_topics(run: Run, job: JobContext) -> None:
    """Score each topic's texts in the context of each topic (CDE, Figure 7).

    Raises:
        ArtifactError: a model that takes no context, or no model.
        ConfigError: an unknown task.
        DataError: too few topics with enough held-out articles.
    """
    from rayembed.pipeline.run.on_ray import connect
    from rayembed_papers.context.report import deliver, topic_report
    from rayembed_papers.context.sizes import contextual_folder
    from rayembed_papers.context.topics import topic_scores, topic_tasks
    from rayembed_papers.measure_on_ray import measured_on_ray

    args, output = job.args, _output(run, job, "topics")
    reference = args.model or trained_model(run)
    contextual_folder(reference)
    topic_tasks(run, args.task)
    check_writable(output)
    connect()
    found = measured_on_ray(
        topic_scores, reference, run, task=args.task, draws=args.draws, **_where(run)
    )
    deliver(topic_report(found), output, job.out)


def trained_model(run: Run) -> str:
    """Return the folder of the run's trained model."""
    return join(run.placement.storage_path, "runs", run.name, "models", run.stages[-1].name)


def _output(run: Run, job: JobContext, analysis: str) -> str:
    """Return the folder in which to write the table and the plot."""
    return job.args.output or join(run.placement.storage_path, FOLDER, analysis)


def _where(run: Run) -> dict[str, Any]:
    return {
        "name": f"{run.name}-context",
        "results_folder": join(run.placement.storage_path, FOLDER),
        "placement": run.placement,
    }


def _names(text: str) -> tuple[str, ...]:
    names = names_in(text)
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} contains no name; expected names such as A,B")
    return names


def _numbers(least: int) -> Callable[[str], list[int]]:
    def numbers(text: str) -> list[int]:
        return [at_least(least)(part) for part in text.split(",")]

    return numbers


_READER = Reader(
    kind=Run,
    base=base_run,
    names=recipe_names,
    recipe="the run whose data or evaluation is taken",
    default=RECIPE,
    examples="seed=1",
)

_OUTPUT = option(
    "--output FOLDER",
    f"where table.md, table.csv and plot.png go; default: {FOLDER}/ANALYSIS in storage",
)

_OF_A_MODEL = (
    option(
        "--model REFERENCE",
        "a saved CDE model; default: that of the recipe's run in storage",
        type=expanded_name,
    ),
    option("--draws N", "draws of context documents, by other seeds", type=at_least(1), default=3),
)


def _analysis(analyse: Callable[[Run, JobContext], None], *options: Option) -> Job[Run]:
    return Job(
        options=(*options, *_READER.options, _OUTPUT),
        read=lambda args: placed(_READER(args)),
        run=analyse,
        log=(__package__,),
    )


ANALYSES = {
    "batches": _analysis(
        analyse_batches,
        option("--datasets A,B", "only these of the run; default: all"),
        option(
            "--cluster-sizes 16,64,256",
            "mean pairs of a cluster; default: powers of two up to a quarter of the pairs",
            type=_numbers(1),
        ),
        option(
            "--batch-sizes 16,64",
            "pairs of a batch; default: those of 16, 64 and 256 that fit the data",
            type=_numbers(2),
        ),
        option("--pairs N", "pairs of each data set", type=at_least(2), default=100_000),
        option("--batches N", "batches of each kind", type=at_least(1), default=1000),
    ),
    "sizes": _analysis(
        analyse_sizes,
        option(
            "--sizes 0,8,32",
            "numbers of documents; default: 0, powers of two, as many as the model takes",
            type=_numbers(0),
        ),
        option(
            "--tasks A,B", "retrieval tasks of the sample", type=_names, default=",".join(_TASKS)
        ),
        *_OF_A_MODEL,
    ),
    "topics": _analysis(
        analyse_topics,
        option("--task NAME", "the retrieval task made of each topic", default=_TASKS[0]),
        *_OF_A_MODEL,
    ),
}
"""Analyses: difficulty of batches by sizes of clusters and batches; scores by the number of context
documents; scores of each topic's texts in each topic's context."""


def run_context_job(
    argv: Sequence[str], *, about: str | None = None, prog: str | None = None
) -> int:
    """Run an analysis of CDE's batches or context; return the exit code."""
    if refused := exit_code(partial(check_no_credentials, argv)):
        return refused
    epilog = "ANALYSIS --help: its options"
    parser = argparse.ArgumentParser(prog=prog, description=about, epilog=epilog)
    parser.add_argument("analysis", choices=ANALYSES, metavar="ANALYSIS", help=", ".join(ANALYSES))
    name: str = parser.parse_args(argv[:1]).analysis
    about_it, _, _ = str(ANALYSES[name].run.__doc__).partition("\n")
    return ANALYSES[name](argv[1:], about=about_it, prog=f"{parser.prog} {name}")
