"""Report an analysis of context by a table, a plot and a sentence with the main result."""

from dataclasses import dataclass
from statistics import fmean
from typing import TextIO

from rayembed.assets.storage import join, write_atomic
from rayembed.display.tables import Cell, Table, console, show
from rayembed.errors import StorageError
from rayembed.evaluation.tables import heading
from rayembed_papers.context.difficulty import RANDOM
from rayembed_papers.context.plots import (
    Difficulties,
    difficulty_lines,
    size_lines,
    topic_squares,
)
from rayembed_papers.context.sizes import SizeScores
from rayembed_papers.context.topics import EVERY_TOPIC, NO_CONTEXT, TopicScores
from rayembed_papers.spread import (
    SpreadTable,
    shown,
    spread_csv,
    spread_markdown,
    spread_table,
)

_SIZE = "documents"
_TOPIC = "texts of"


@dataclass(frozen=True)
class Report:
    """Result of an analysis: a table, a plot and a sentence."""

    table: Table
    markdown: str
    csv: str
    png: bytes
    sentence: str
    """A sentence with the main result in numbers."""


def deliver(report: Report, folder: str, out: TextIO) -> None:
    """Write `table.md`, `table.csv` and `plot.png`; print the table, the file paths and the
    sentence.

    Raises:
        StorageError: the folder cannot be written.
    """
    files = {
        "table.md": f"{report.markdown}\n{report.sentence}\n".encode(),
        "table.csv": report.csv.encode(),
        "plot.png": report.png,
    }
    for name, data in files.items():
        try:
            write_atomic(join(folder, name), data)
        except StorageError as error:
            raise StorageError(
                f"cannot write the report to {folder!r}: {error}; make the folder writable, or "
                "choose another --output"
            ) from error
    printer = console(out)
    printer.print(report.table)
    printer.print(f"Written  {', '.join(join(folder, name) for name in files)}", soft_wrap=True)
    printer.print(report.sentence, soft_wrap=True)


def difficulty_report(found: Difficulties) -> Report:
    """Report how batch difficulty depends on the sizes of clusters and of batches."""
    heads = [
        "pairs of a cluster",
        "pairs of a batch",
        "batches",
        "mean cosine",
        "deviation",
        "after the filter",
        "filtered",
    ]
    rows = [
        [
            RANDOM if size is None else str(size),
            str(pairs),
            str(len(one.means)),
            f"{one.mean:.4f}",
            f"{one.deviation:.4f}",
            f"{one.mean_left:.4f}",
            f"{one.masked_share:.2%}",
        ]
        for size, by_batch in found.items()
        for pairs, one in by_batch.items()
    ]
    table = Table(heads, rows, title="Difficulty of in-batch negatives", align="r")
    return Report(
        table=table,
        markdown=show(table, "markdown"),
        csv=show(table, "csv"),
        png=difficulty_lines(found),
        sentence=_of_difficulty(found),
    )


def _of_difficulty(found: Difficulties) -> str:
    sizes = [size for size in found if size is not None]
    hardest = []
    for pairs, random in found[None].items():
        best = max(sizes, key=lambda size: found[size][pairs].mean)
        hardest.append(
            f"{pairs} pairs with clusters of {best} (mean cosine {found[best][pairs].mean:.3f}, "
            f"{random.mean:.3f} in random order)"
        )
    return f"Hardest are batches of {', of '.join(hardest)}."


def size_report(found: SizeScores) -> Report:
    """Report how scores depend on the number of context documents."""
    table = SpreadTable({str(size): scores for size, scores in sorted(found.items())})
    title = "Scores by the number of context documents, mean ± deviation over draws"
    return Report(
        table=spread_table(table, _SIZE, title=title),
        markdown=spread_markdown(table, _SIZE),
        csv=spread_csv(table, _SIZE),
        png=size_lines(table),
        sentence=_of_sizes(table),
    )


def _of_sizes(table: SpreadTable) -> str:
    column = table.columns[-1]
    scores = {label: table.scores(label, column) for label in table.rows}
    means = {label: fmean(values) for label, values in scores.items()}
    first, last = next(iter(means)), list(means)[-1]
    best = max(means, key=lambda label: means[label])
    if len(means) == 1:
        return f"The score with {first} context documents is {shown(scores[first])}."
    what = "The mean score" if len(table.tasks) > 1 else "The score"
    return (
        f"{what} is {shown(scores[first])} with {first} context documents and "
        f"{shown(scores[last])} with {last} ({means[last] - means[first]:+.3f}); it is highest "
        f"with {best}."
    )


def topic_report(found: TopicScores) -> Report:
    """Report the scores of each topic's texts with context documents of each topic."""
    name, metric = heading(found.task)
    numbers = [str(number) for number, _ in enumerate(found.topics, start=1)]
    marked, shown_means, rows = [], [], []
    for number, topic in zip(numbers, found.topics, strict=True):
        means = [found.mean(topic, context) for context in found.contexts]
        near = [found.near_best(topic, context) for context in found.contexts]
        both = list(zip(means, near, strict=True))
        marked.append([topic, *(Cell(mean, best=is_near) for mean, is_near in both)])
        short = [f"{100 * mean:.1f}{'*' if is_near else ''}" for mean, is_near in both]
        shown_means.append([f"{number:>2} {topic}", *short])
        rows += [
            [topic, context, draw, score]
            for context in found.contexts
            for draw, score in enumerate(found.scores[topic][context])
        ]
    return Report(
        table=Table(
            [_TOPIC, *numbers, "all", "none"],
            shown_means,
            title=f"{name}, {metric} × 100, by context",
            align="lr",
            look="open",
            caption="columns: context documents of these topics; * within one point of the best",
        ),
        markdown=show(Table([_TOPIC, *found.contexts], marked, align="lr"), "markdown")
        + "\nBold: within one point of the best of its row.\n",
        csv=show(Table([_TOPIC, "context of", "draw", "score"], rows), "csv"),
        png=topic_squares(found),
        sentence=_of_topics(found),
    )


def _of_topics(found: TopicScores) -> str:
    near = sum(found.near_best(topic, topic) for topic in found.topics)
    return (
        f"The own topic's documents come within one point of the best context for {near} of "
        f"{len(found.topics)} topics. Mean score with them {found.mean_of_own:.3f}, with another "
        f"topic's {found.mean_of_others:.3f}, with all topics' {found.mean_of(EVERY_TOPIC):.3f}, "
        f"without context {found.mean_of(NO_CONTEXT):.3f}."
    )
