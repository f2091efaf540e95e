"""Tables of an adaptation: what it needs, and what was drawn of each language."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rayembed.display.tables import Table, console, facts_table
from rayembed.pipeline.estimate.requirements import (
    ModelSize,
    auto_device,
    expected_precision,
    known_settings,
    looked_up,
    machines,
    worker_memory,
)
from rayembed.pipeline.estimate.time import FILLED, Work, work_of
from rayembed_extras.adaptation.settings import Adaptation, MaskingConfig, TextsSource


def print_adaptation(run: Adaptation, *, out: TextIO, tables: TextIO) -> None:
    """Write the run as YAML to `out` and what it would need to `tables`; see `print_dry_run`.

    Raises:
        ConfigError, ArtifactError: the model cannot be built as configured.
    """
    size = adaptation_size(run)
    out.write(f"# adaptation {run.name}, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    out.flush()
    printer = console(tables)
    printer.print(_needs(run, size))
    printer.print(_texts(run))


def print_adaptations(runs: Iterable[Adaptation], *, out: TextIO) -> None:
    """Write a table of recipes."""
    rows = []
    for run in runs:
        training = run.training
        size = f"{training.global_sequences:,} × {run.corpus.max_length:,} tokens"
        path = run.model.backbone.path.partition("?")[0]
        rows.append([run.name, path, f"{training.steps:,} of {size}"])
    console(out).print(Table(["recipe", "encoder", "steps"], rows, title="Recipes"))


def adaptation_size(run: Adaptation) -> ModelSize | None:
    """Numbers of parameters, the head's too; None where the shape is not known here."""
    path = run.model.backbone.path
    settings = known_settings(path, "model.backbone.path")
    if settings is None:
        return None
    from rayembed_extras.adaptation.encoder import empty_masked_language_model

    model = empty_masked_language_model(settings, run.model, path)
    total = sum(p.numel() for p in model.parameters())
    return ModelSize(total=total, trainable=total)


@work_of.register
def adaptation_work(run: Adaptation) -> Work | None:
    """Count the encoder for each token, and the probabilities of words for each masked one."""
    training, corpus, path = run.training, run.corpus, run.model.backbone.path
    size, settings = adaptation_size(run), known_settings(path, "model.backbone.path")
    if size is None or settings is None:
        return None
    words = looked_up(settings)

    def of_batches(number: int, masking: MaskingConfig) -> float:
        filled = 1.0 if corpus.layout == "packed" else FILLED
        tokens = number * filled * training.global_sequences * corpus.max_length
        return 2.0 * tokens * (size.total - words + masking.probability * words)

    scores, held_out = 0.0, training.held_out
    if held_out is not None:
        times = math.ceil(training.steps / (held_out.every_steps or training.steps))
        scores = of_batches(times * held_out.batches, held_out.masking)
    return Work(3.0 * of_batches(training.steps, run.masking), scores, 1)


def corpus_table(languages: Sequence[Mapping[str, Any]], metrics: Mapping[str, float]) -> Table:
    """Share of each language in the corpus and in the batches, and the last step's metrics.

    Args:
        languages: as the manifest of the plan tells them.
        metrics: of a step; of a language that it has none of nothing is shown.
    """
    rows = []
    for told in languages:
        code = told["language"]
        perplexity, accuracy, kept_perplexity, kept_accuracy = (
            metrics.get(f"{kind}{name}/{code}")
            for kind in ("", "held_out/")
            for name in ("perplexity", "masked_accuracy")
        )
        rows.append(
            [
                code,
                *(f"{told[name]:,}" for name in ("texts", "tokens", "sequences")),
                f"{told['share']:.2%}",
                f"{told['drawn']:,}",
                f"{told['drawn_share']:.2%}",
                f"{told['epochs']:.2f}",
                "" if perplexity is None else f"{perplexity:,.1f}",
                "" if accuracy is None else f"{accuracy:.1%}",
                "" if kept_perplexity is None else f"{kept_perplexity:,.1f}",
                "" if kept_accuracy is None else f"{kept_accuracy:.1%}",
            ]
        )
    heads = ["language", "texts", "tokens", "sequences", "share", "drawn", "share drawn", "epochs"]
    heads += ["perplexity", "masked accuracy", "held-out perplexity", "held-out accuracy"]
    return Table(heads, rows, title="Languages", align="lr")


def _needs(run: Adaptation, size: ModelSize | None) -> Table:
    placement, training, corpus = run.placement, run.training, run.corpus
    facts = {"encoder": run.model.backbone.path.partition("?")[0]}
    if size is None:
        facts["parameters"] = "not known without fetching the model"
    else:
        precision = expected_precision(run)
        states = training.optimizer.state_bytes
        memory = worker_memory(size, precision.dtype, placement, states)
        facts["parameters"] = f"{size.total:,}, all trained, the head's among them"
        facts["memory a worker"] = (
            f"{memory.total / 2**30:.2f} GiB and activations "
            f"({precision.dtype}, ZeRO {placement.zero_stage})"
        )
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
