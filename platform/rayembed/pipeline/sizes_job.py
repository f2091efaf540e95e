"""The job that makes a family of sizes: from its arguments to runs. Its functions import what they
need.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rayembed.config.run import Run
from rayembed.errors import ConfigError
from rayembed.pipeline.family import Family, Size, cuts, size_in
from rayembed.pipeline.job import Job, JobContext, Reader, option
from rayembed.pipeline.training_job import A_RECIPE, base_run

_SIZES = ("layers,share=0.5", "layers,share=0.25")

_MODEL = option(
    "--model REFERENCE",
    "the trained model to cut, a folder, hf://…, s3://…, pypi://… or models:/name@alias; "
    "default: the recipe's own start model",
    sets="model.backbone.path",
)

_READER = Reader(
    kind=Run,
    own=(_MODEL,),
    base=base_run,
    recipe=f"the training of each size: {A_RECIPE}",
    default="biencoder-quickstart",
    examples="stages.finetune.steps=300, stages.finetune.optimizer.learning_rate=1e-4",
    named=True,
)


def _read(args: argparse.Namespace) -> Family:
    run = _READER(args)
    sizes = tuple(map(size_in, args.sizes or _SIZES))
    labels = [size.label for size in sizes]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"--size: two sizes are called {twice[0]!r}; name each once")
    _check_texts(args, sizes)
    return Family(run, sizes, args.texts, tuple(args.languages))


def _check_texts(args: argparse.Namespace, sizes: Sequence[Size]) -> None:
    """Raise where texts or languages are named that decide nothing."""
    if args.texts is not None and args.languages:
        raise ConfigError(
            "--language chooses among the texts of the training data, and --texts names others; "
            "give one of the two"
        )
    if args.languages and not any(way.needs_texts for size in sizes for way in size.ways):
        raise ConfigError(
            "--language says which tokens a smaller vocabulary keeps, and no size has one; add "
            "--size vocabulary, or leave --language out"
        )


def _make(family: Family, context: JobContext) -> None:
    from rayembed.pipeline.sizes import make_sizes, sizes_table, write_report
    from rayembed.pipeline.storage import placed
    from rayembed.tables import console

    members = make_sizes(family)
    console(context.out).print(sizes_table(members))
    for member in members[1:]:
        context.out.write(f"{member.label:<20} {member.place}\n")
    context.out.write(f"Report               {write_report(placed(family.run), members)}\n")


def _list(context: JobContext) -> None:
    for kind, way in cuts().items():
        context.out.write(f"{kind:<12} {(way.__doc__ or '').splitlines()[0]}\n")


def _show(family: Family, context: JobContext) -> None:
    """The training of the sizes, after a look at the files of a model that lies here."""
    folder = Path(family.run.model.backbone.path)
    for size in family.sizes if folder.is_dir() else ():
        for way in size.ways:
            way.check(folder)
    context.out.write(family.run.to_yaml())
    context.err.write(f"sizes: {', '.join(size.label for size in family.sizes)}\n")


run_sizes_job = Job(
    options=(
        option(
            "--size WAY[+WAY]",
            "a size, cut in one or several ways: layers,share=0.5, layers,number=3, vocabulary, "
            f"vocabulary+layers,share=0.5; default: {' and '.join(_SIZES)}",
            often=True,
            dest="sizes",
        ),
        option(
            "--texts PATH",
            "texts whose tokens a smaller vocabulary keeps, Parquet, JSONL or CSV with a column "
            "`text`; default: the training data",
        ),
        option(
            "--language CODE",
            "a language of the training data whose tokens a smaller vocabulary keeps; default: all",
            often=True,
            dest="languages",
        ),
        *_READER.options,
    ),
    read=_read,
    run=_make,
    lists=("the ways to cut a model", _list),
    shows=("the training of each size", "the sizes", _show),
)
"""The job that makes a family of sizes."""
