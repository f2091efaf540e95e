"""Convert splits of mteb tasks to rows that the other sources can read.

mteb's own loader provides a task's data; the task's type determines what its rows are. They are
written as Parquet files and then treated as pairs, sentences with a similarity, or texts with
classes. The origin of a row is `task/split/subset#row`, followed by the position if a row holds a
list, or by the query id.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic
from rayembed.config.document import fingerprint
from rayembed.data.cleaning.evaluation_texts import load_data, loading_errors
from rayembed.data.engine.parts import ROWS_PER_PART
from rayembed.data.engine.work_items import Result
from rayembed.data.sources.cells import RowError, name_in
from rayembed.errors import ConfigError, DataError

Rows = Literal["pairs", "translations", "sts", "alike", "classes", "clusters"]

_ROWS_OF_TYPE: dict[str, Rows] = {
    "Retrieval": "pairs",
    "Reranking": "pairs",
    "InstructionRetrieval": "pairs",
    "InstructionReranking": "pairs",
    "BitextMining": "translations",
    "STS": "sts",
    "PairClassification": "alike",
    "Classification": "classes",
    "MultilabelClassification": "classes",
    "Clustering": "clusters",
}

_PAIRS = pa.schema(
    [
        ("query", pa.string()),
        ("positives", pa.list_(pa.string())),
        ("negatives", pa.list_(pa.string())),
        ("language", pa.string()),
        ("origin", pa.string()),
    ]
)
_SENTENCES = pa.schema(
    [
        ("first", pa.string()),
        ("second", pa.string()),
        ("score", pa.float64()),
        ("language", pa.string()),
        ("origin", pa.string()),
    ]
)
_CLASSES = pa.schema(
    [
        ("text", pa.string()),
        ("label", pa.list_(pa.string())),
        ("language", pa.string()),
        ("origin", pa.string()),
    ]
)
_SCHEMAS: dict[Rows, pa.Schema] = {
    "pairs": _PAIRS,
    "translations": _PAIRS,
    "sts": _SENTENCES,
    "alike": _SENTENCES,
    "classes": _CLASSES,
    "clusters": _CLASSES,
}


class SplitOfTask(NamedTuple):
    """Work item of `StageTask`: a split of an mteb task."""

    name: str
    split: str
    subset: str | None

    @property
    def key(self) -> str:
        """Always the same key, because a data set has a single work item."""
        return "split"


def data_fingerprint(of: SplitOfTask) -> str:
    """Load a task, check its split and return the fingerprint of its data.

    Raises:
        ConfigError: no such task or subset, a type that gives no records, or a split that the task
            evaluates on or does not have; the message names those that it has.
        DataError: mteb cannot load it.
    """
    import mteb

    task = _loaded(of)
    metadata = task.metadata
    return fingerprint(
        {
            "task": metadata.name,
            "dataset": {name: str(value) for name, value in sorted(metadata.dataset.items())},
            "split": of.split,
            "subsets": list(task.hf_subsets),
            "mteb": mteb.__version__,
        }
    )


def kind_of_rows(of: SplitOfTask) -> tuple[Rows, float, float]:
    """Return the kind of rows in a task's split, and the lowest and highest of its scores."""
    task = _task(of)
    bounds = (getattr(task, "min_score", 0.0), getattr(task, "max_score", 1.0))
    return (_ROWS_OF_TYPE[task.metadata.type], *bounds)


@dataclass(frozen=True)
class StageTask:
    """Task that writes a split of an mteb task as Parquet files."""

    folder: str

    def __call__(self, item: SplitOfTask) -> Result:
        """Run the task; its result has the names of the written files as `staged`."""
        task = _loaded(item)
        kind = _ROWS_OF_TYPE[task.metadata.type]
        names: list[str] = []
        rows = _rows(task, item.split)
        while some := list(islice(rows, ROWS_PER_PART)):
            names.append(f"{len(names):06d}.parquet")
            table = pa.Table.from_pylist(some, _SCHEMAS[kind])
            write_atomic(join(self.folder, names[-1]), parquet_bytes(table))
        if not names:
            raise DataError(f"split {item.split!r} of the mteb task {item.name!r} is empty")
        return {"staged": names}


def _task(of: SplitOfTask) -> Any:
    """Create the mteb task, without data, restricted to the split."""
    import mteb
    from mteb.get_tasks import _TASKS_REGISTRY

    name, split, subset = of
    try:
        task = mteb.get_task(
            name, eval_splits=[split], hf_subsets=None if subset is None else [subset]
        )
    except KeyError:
        close = difflib.get_close_matches(name, _TASKS_REGISTRY, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"source.task = {name!r}: mteb has no such task{hint}") from None
    except ValueError:
        subsets = mteb.get_task(name).metadata.hf_subsets
        raise ConfigError(
            f"source.subset = {subset!r}: the mteb task {name!r} has only the subsets "
            f"{', '.join(subsets)}"
        ) from None
    metadata = task.metadata
    if metadata.type not in _ROWS_OF_TYPE or metadata.modalities != ["text"]:
        raise ConfigError(
            f"source.task = {name!r}: the task has the type {metadata.type} and the modalities "
            f"{', '.join(metadata.modalities)}; training records can only be made of text tasks "
            f"of the types {', '.join(_ROWS_OF_TYPE)}"
        )
    if split in metadata.eval_splits:
        raise ConfigError(
            f"source.split = {split!r}: the mteb task {name!r} evaluates on "
            f"{', '.join(metadata.eval_splits)}, so this split cannot be trained on; use a split "
            "that the task does not evaluate on"
        )
    return task


@lru_cache(maxsize=1)
def _loaded(of: SplitOfTask) -> Any:
    name, split, _ = of
    task = _task(of)
    try:
        _check_judgements(task, name, split)
        load_data(task)
    except ConfigError:
        raise
    except loading_errors() as error:
        raise DataError(
            f"mteb cannot load split {split!r} of its task {name!r} "
            f"({type(error).__name__}): {error}"
        ) from error
    for hf_subset in task.hf_subsets:
        splits = _splits(task, hf_subset)
        if split not in splits:
            _refuse(name, hf_subset, split, list(splits))
    return task


def _check_judgements(task: Any, name: str, split: str) -> None:
    """Raise if the relevance judgements do not have the split.

    mteb's loader substitutes the only available split for any requested one, so that the test split
    would pass for training data.
    """
    from datasets import get_dataset_config_names, get_dataset_split_names
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    if type(task).load_data is not AbsTaskRetrieval.load_data:
        return
    where = {"path": task.metadata.dataset["path"], "revision": task.metadata.dataset["revision"]}
    configs = get_dataset_config_names(**where)
    for subset in task.hf_subsets:
        config = f"{subset}-qrels"
        if subset == "default" or not task.metadata.is_multilingual:
            config = "default" if "default" in configs else "qrels"
        splits = get_dataset_split_names(**where, config_name=config)
        if split not in splits:
            _refuse(name, subset, split, splits)


def _refuse(name: str, subset: str, split: str, splits: list[str]) -> None:
    raise ConfigError(
        f"source.split = {split!r}: the mteb task {name!r} (subset {subset!r}) has the splits "
        f"{', '.join(splits) or 'none'}"
    )


def _splits(task: Any, subset: str) -> Mapping[str, Any]:
    """Return the data of a subset by split."""
    dataset = task.dataset
    return dict(dataset.get(subset, dataset))


def _rows(task: Any, split: str) -> Iterator[dict[str, Any]]:
    """Yield all rows of all subsets, in order."""
    kind = _ROWS_OF_TYPE[task.metadata.type]
    for subset in task.hf_subsets:
        start = f"{task.metadata.name}/{split}/{subset}"
        data = _splits(task, subset)[split]
        language = _language(task, subset)
        match kind:
            case "pairs":
                rows = _judged(data)
            case "translations":
                columns = subset.split("-") if task.parallel_subsets else []
                rows = _translations(data, columns or ["sentence1", "sentence2"])
            case "sts":
                rows = _sentences(data, [*task.column_names, "score"])
            case "alike":
                inputs = [task.input1_column_name, task.input2_column_name]
                rows = _sentences(data, [*inputs, task.label_column_name])
            case _:
                rows = _labelled(
                    data, task.input_column_name, task.label_column_name, kind == "clusters"
                )
        for place, row in rows:
            yield {**row, "language": language, "origin": f"{start}#{place}"}


def _judged(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each query with its id and the documents judged relevant or not."""
    relevant = data["relevant_docs"]
    needed = {document for judged in relevant.values() for document in judged}
    corpus = data["corpus"]
    place = {name: row for row, name in enumerate(corpus["id"]) if name in needed}

    def texts(judged: Mapping[str, float], wanted: bool) -> list[str | None]:
        names = [name for name, score in sorted(judged.items()) if (score > 0) == wanted]
        return [_document(corpus[place[name]]) for name in names if name in place]

    for query in data["queries"]:
        judged = relevant.get(query["id"], {})
        row = {"query": _query(query), "positives": texts(judged, True)}
        yield query["id"], {**row, "negatives": texts(judged, False)}


def _document(row: Mapping[str, Any]) -> str:
    """Join title and text as mteb shows them to a model."""
    return " ".join(t for t in (row.get("title"), row.get("text")) if t and t.strip())


def _query(row: Mapping[str, Any]) -> str | None:
    """Join a query with its own instruction, and the turns of a conversation into one text."""
    text = row["text"]
    if isinstance(text, list):
        turns = [f"{t['role']}: {t['content']}" if isinstance(t, dict) else str(t) for t in text]
        text = "; ".join(turns)
    instruction = row.get("instruction")
    return f"{text} {instruction}" if text and instruction else text


def _translations(data: Any, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    first, second = columns
    for number, row in enumerate(data):
        yield str(number), {"query": row[first], "positives": [row[second]], "negatives": []}


def _sentences(data: Any, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    first, second, score = columns
    for place, row in _exploded(data, columns):
        pair = {"first": row[first], "second": row[second]}
        yield place, {**pair, "score": None if row[score] is None else float(row[score])}


def _labelled(
    data: Any, text: str, label: str, levels: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield texts with class names; of hierarchical clusters the finest level."""
    feature = data.features[label]
    feature = getattr(feature, "feature", feature)
    class_names = getattr(feature, "names", None)
    if "label_text" in data.column_names:
        label, class_names = "label_text", None
    for place, row in _exploded(data, [text, label]):
        values = row[label] if isinstance(row[label], list) else [row[label]]
        named = [_named(value, class_names) for value in (values[-1:] if levels else values)]
        yield place, {"text": row[text], "label": [name for name in named if name is not None]}


def _named(value: Any, names: list[str] | None) -> str | None:
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    try:
        return name_in({"label": value}, "label")
    except RowError:
        return None


def _exploded(data: Any, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield numbered rows; a row of lists becomes one row for each element."""
    for number, row in enumerate(data.select_columns(list(dict.fromkeys(columns)))):
        if not isinstance(row[columns[0]], list):
            yield str(number), row
            continue
        for place in range(len(row[columns[0]])):
            yield f"{number}.{place}", {name: row[name][place] for name in columns}


def _language(task: Any, subset: str) -> str | None:
    """Return the language code or codes of a subset; None if languages are not distinguished."""
    scripts = task.metadata.hf_subsets_to_langscripts.get(subset, [])
    codes = sorted({script.partition("-")[0] for script in scripts})
    return "-".join(codes) if len(codes) == 1 or task.metadata.is_multilingual else None
