"""Print tables of an adaptation: estimated parameters and memory, and the sequences drawn of each
language.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rayembed.display.tables import Table, console, facts_table
from rayembed.pipeline.run.dry_run import auto_device, estimates, machines
from rayembed_extras.adaptation.settings import Adaptation, TextsSource


def print_adaptation(run: Adaptation, *, out: TextIO, tables: TextIO) -> None:
    """Write the run as YAML to `out`, and tables of its estimated memory and its texts to `tables`;
    see `print_dry_run`.

    Raises:
        ConfigError, ArtifactError: the model cannot be built as configured.
    """
    counted = estimates().needs(run)
    out.write(f"# adaptation {run.name}, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    out.flush()
    printer = console(tables)
    printer.print(_needs(run, counted))
    printer.print(_texts(run))


def print_adaptations(runs: Iterable[Adaptation], *, out: TextIO) -> None:
    """Write a table of all adaptation recipes."""
    rows = []
    for run in runs:
        training = run.training
        size = f"{training.global_sequences:,} × {run.corpus.max_length:,} tokens"
        path = run.model.backbone.path.partition("?")[0]
        rows.append([run.name, path, f"{training.steps:,} of {size}"])
    console(out).print(Table(["recipe", "encoder", "steps"], rows, title="Recipes"))


def corpus_table(languages: Sequence[Mapping[str, Any]], metrics: Mapping[str, float]) -> Table:
    """Tabulate each language's share of the corpus and of the batches, and the last step's
    metrics.

    Args:
        languages: from the manifest of the plan.
        metrics: of a step; of a language that it has none of nothing is shown.
    """
    rows = []
    for entry in languages:
        code = entry["language"]
        perplexity, accuracy, kept_perplexity, kept_accuracy = (
            metrics.get(f"{kind}{name}/{code}")
            for kind in ("", "held_out/")
            for name in ("perplexity", "masked_accuracy")
        )
        rows.append(
            [
                code,
                *(f"{entry[name]:,}" for name in ("texts", "tokens", "sequences")),
                f"{entry['share']:.2%}",
                f"{entry['drawn']:,}",
                f"{entry['drawn_share']:.2%}",
                f"{entry['epochs']:.2f}",
                "" if perplexity is None else f"{perplexity:,.1f}",
                "" if accuracy is None else f"{accuracy:.1%}",
                "" if kept_perplexity is None else f"{kept_perplexity:,.1f}",
                "" if kept_accuracy is None else f"{kept_accuracy:.1%}",
            ]
        )
    heads = ["language", "texts", "tokens", "sequences", "share", "drawn", "share drawn", "epochs"]
    heads += ["perplexity", "masked accuracy", "held-out perplexity", "held-out accuracy"]
    return Table(heads, rows, title="Languages", align="lr")


def _needs(run: Adaptation, counted: dict[str, str]) -> Table:
    placement, training, corpus = run.placement, run.training, run.corpus
    facts = {"encoder": run.model.backbone.path.partition("?")[0]} | counted
    tokens = training.steps * training.global_sequences * corpus.max_length
    facts["steps"] = (
        f"{training.steps:,} of {training.global_sequences:,} sequences of {corpus.max_length:,} "
        f"tokens, {corpus.layout}: {tokens:,} tokens at most"
    )
    held_out = 0 if training.held_out is None else training.held_out.batches
    planned = (training.steps + held_out) * training.global_sequences * corpus.max_length
    plan = f"{4 * planned / 2**30:.2f} GiB at most, and as much again while it is made"
    facts["disk, plan"] = plan
    facts["disk, sequences"] = (
        "at most about 4 bytes for each token of the whole corpus, also of what no step draws; how "
        "many these are is not known before it is read"
    )
    facts |= auto_device(placement)
    facts["machines"] = machines(placement)
    facts["root of the texts"] = corpus.root or "the working directory"
    facts["storage"] = placement.storage_path
    return facts_table(f"{run.name}, fingerprint {run.fingerprint}: what it needs", facts)


def _texts(run: Adaptation) -> Table:
    rows = []
    for texts in run.corpus.texts:
        source = texts.source
        column = source.language if isinstance(source, TextsSource) else None
        language = texts.language or f"column {column!r}"
        rows.append([texts.name, language, source.path.partition("?")[0]])
    return Table(["texts", "language", "source"], rows, title="Corpus")
