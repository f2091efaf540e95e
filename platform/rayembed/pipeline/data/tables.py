"""Tables that data jobs print: planned steps, results, the catalogue of data sets."""

from collections.abc import Collection, Mapping, Sequence
from typing import TextIO

from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.data_run import DataRun
from rayembed.config.data_steps import data_steps
from rayembed.data.audit import AUDIT
from rayembed.data.engine.artifacts import DatasetArtifact
from rayembed.data.sources.tasks import counts_of
from rayembed.display.tables import Table, console
from rayembed.pipeline.run.held_out import held_out_set_of
from rayembed.recipes.data_recipes import DATA_RECIPES, data_recipe_names, get_data_recipe


def print_data_run(run: DataRun, names: Collection[str], out: TextIO) -> None:
    """Print a table of the data sets with the steps planned for each."""
    rows = [
        [dataset.name, dataset.task, requested_rows(dataset), *_steps(dataset)]
        for dataset in run.data.datasets
        if dataset.name in names
    ]
    heads = ["data set", "task", "rows", "source", "held out", "cleaning"]
    heads += [step.heading for step in data_steps()]
    console(out).print(Table(heads, rows, title=f"Data run {run.name}"))


def print_prepared(run: DataRun, done: Mapping[str, Sequence[DatasetArtifact]]) -> None:
    """Print the results and folders of each step, and the command to run next."""
    rows = []
    for name, folders in done.items():
        for prepared in folders:
            found = prepared.manifest
            rows.append(
                [
                    name,
                    found["kind"],
                    f"{found['rows_in']:,}",
                    f"{sum(found['rejected'].values()):,}",
                    f"{found['records_made']:,}",
                    f"{sum(found['dropped'].values()):,}",
                    f"{found['rows_out']:,}",
                    "was there" if prepared.reused else f"{found['seconds']:.1f}",
                ]
            )
    numbers = ["rows in", "rejected", "records", "dropped", "rows out", "seconds"]
    printer = console()
    title = f"Data run {run.name}"
    printer.print(Table(["data set", "step", *numbers], rows, title=title, align="llr"))
    for name, folders in done.items():
        last = folders[-1]
        printer.print(f"{name}  {last.folder}")
        printer.print(f"  audit  {join(last.folder, AUDIT)}")
        dataset = next(dataset for dataset in run.data.datasets if dataset.name == name)
        if (held_out := held_out_set_of(dataset, folders[0])) is not None:
            printer.print(f"  held out  {held_out.summary} ({held_out.path})")
        if rules := folders[0].manifest.get("pair_rules"):
            printer.print(f"  rules  {counts_of(rules)}")
        if last.manifest["kind"] == "clustered":
            # As a source its rows would lose their batches.
            printer.print("  use    training with the same data set, seed and storage finds it")
        else:
            printer.print(f"  use    source: {{kind: records, path: {last.folder}}}")


def print_catalogue(out: TextIO) -> None:
    """Print the data recipes, and the data sets of the catalogue."""
    recipes = []
    for name in data_recipe_names():
        datasets = get_data_recipe(name).data.datasets
        shown = ", ".join(dataset.name for dataset in datasets[:6])
        more = f" and {len(datasets) - 6} more" if len(datasets) > 6 else ""
        recipes.append([name, shown + more])
    printer = console(out)
    printer.print(Table(["recipe", "data sets"], recipes, title="Data recipes"))
    lines: dict[str, None] = {}
    for recipe in DATA_RECIPES.members().values():
        for listed in recipe.listing():
            if isinstance(listed, str):
                lines[listed] = None
            else:
                printer.print(listed)
    for line in lines:
        printer.print(line, soft_wrap=True)


def requested_rows(dataset: DatasetConfig) -> str:
    """Describe how many records of a data set are sampled: `10%`, `5,000` or `all`."""
    if dataset.sample_share is not None:
        return f"{dataset.sample_share:.0%}"
    return "all" if dataset.num_samples is None else f"{dataset.num_samples:,}"


def _steps(dataset: DatasetConfig) -> tuple[str, ...]:
    cleaning = sorted(name for name, asked in dataset.cleaning if asked is not None)
    asked = {step.kind: step.summary for step in dataset.steps}
    return (
        dataset.source.summary,
        "" if dataset.held_out is None else dataset.held_out.summary,
        ", ".join(["duplicates", *(name.replace("_", "-") for name in cleaning)]),
        *(asked.get(step.kind, "") for step in data_steps()),
    )
