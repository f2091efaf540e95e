"""Run the job that makes several smaller sizes of a model, from its command-line arguments. Its
functions import what they need.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from rayembed.config.run import Run
from rayembed.config.settings import nearest, parse
from rayembed.errors import ConfigError
from rayembed.pipeline.job import Job, JobContext, Reader, option
from rayembed.pipeline.run.training_job import A_RECIPE, base_run
from rayembed.recipes.catalogue import recipe_names
from rayembed_extras.compression.contract import Compression
from rayembed_extras.compression.settings import COMPRESSIONS, settings_in

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
    names=recipe_names,
    recipe=f"the training of each size: {A_RECIPE}",
    default="biencoder-quickstart",
    examples="stages.finetune.steps=300, stages.finetune.optimizer.learning_rate=1e-4",
    named=True,
)


class Family(NamedTuple):
    """Arguments of `make_sizes`."""

    run: Run
    sizes: dict[str, tuple[Compression, ...]]
    texts: str | None
    languages: tuple[str, ...]

    @property
    def ways(self) -> list[Compression]:
        """Compression methods of all sizes."""
        return [way for ways in self.sizes.values() for way in ways]


def _read(args: argparse.Namespace) -> Family:
    run, sizes = _READER(args), {}
    for text in args.sizes or _SIZES:
        ways = tuple(map(_way, text.split("+")))
        label = "-".join(way.label for way in ways)
        if label in sizes:
            raise ConfigError(f"--size: two sizes have the label {label!r}; give each size once")
        sizes[label] = ways
    family = Family(run, sizes, args.texts, tuple(args.languages))
    if family.texts is not None and family.languages:
        raise ConfigError(
            "--language selects texts of the training data, but --texts names other texts; give "
            "only one of them"
        )
    if family.languages and not any(way.needs_texts for way in family.ways):
        raise ConfigError(
            "--language chooses the tokens of a smaller vocabulary, but no --size reduces the "
            "vocabulary; add --size vocabulary, or leave --language out"
        )
    return family


def _cuts() -> dict[str, type[Compression]]:
    """Compression methods, by `kind`, whose results can be trained further."""
    classes = COMPRESSIONS.classes().items()
    return {kind: way for kind, way in classes if issubclass(way, Compression) and way.is_cut}


def _way(text: str) -> Compression:
    found, ways = settings_in(text), _cuts()
    if found["kind"] not in ways:
        raise ConfigError(
            f"--size {text!r}: a size needs {' or '.join(ways)}, because only models made by "
            f"these methods can be trained further; {nearest(found['kind'], ways)}. For other "
            "methods use rayembed compress"
        )
    return parse(ways[found["kind"]], found)


def _make(family: Family, context: JobContext) -> None:
    from rayembed.display.tables import console
    from rayembed.pipeline.storage import placed
    from rayembed_extras.compression.sizes import make_sizes, sizes_tables, write_report

    members = make_sizes(*family)
    for table in sizes_tables(members):
        console(context.out).print(table)
    for member in members[1:]:
        context.out.write(f"{member.label:<20} {member.made.place}\n")
    context.out.write(f"Report               {write_report(placed(family.run), members)}\n")


def _list(context: JobContext) -> None:
    for kind, way in _cuts().items():
        context.out.write(f"{kind:<12} {(way.__doc__ or '').splitlines()[0]}\n")


def _show(family: Family, context: JobContext) -> None:
    """Show the training runs of the sizes, after checking a local model's files."""
    folder = Path(family.run.model.backbone.path)
    for way in family.ways if folder.is_dir() else ():
        way.check(folder)
    context.out.write(family.run.to_yaml())
    context.err.write(f"sizes: {', '.join(family.sizes)}\n")


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
