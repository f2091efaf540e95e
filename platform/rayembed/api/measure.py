"""Encode, evaluate and mine with a model, and adapt an encoder to documents."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rayembed.api.calls import assignments_of, check_addresses, default_name, reference_of, shown
from rayembed.api.embedder import Embedder, load
from rayembed.api.training import Trained, trained_by
from rayembed.assets.storage import exists, join, write_atomic
from rayembed.config.data_run import DataRun
from rayembed.config.evaluation import EvaluationRun
from rayembed.config.override import overridden, override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.config.types import is_unicode
from rayembed.data.given_rows import Rows, rows_file
from rayembed.display.tables import console
from rayembed.errors import DataError
from rayembed.recipes.catalogue import OWN_CORPUS, get_recipe

_LARGEST_GRADE = 2**31 - 1
_OF_JUDGEMENTS = ["query-id", "corpus-id"]


def encode(
    model: "Embedder | Trained | str | Path", texts: str | Sequence[str], **options: Any
) -> Any:
    """Encode texts with a model, a result of `train`, or a model reference; see
    `Embedder.encode`.
    """
    if isinstance(model, Trained):
        model = model.model
    return (model if isinstance(model, Embedder) else load(str(model))).encode(texts, **options)


def evaluate(
    model: "Embedder | Trained | str | Path",
    tasks: str | Path | Sequence[str] | Mapping[str, Any],
    *,
    baselines: bool = False,
    output: str | Path = "outputs",
    settings: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Evaluate a model and return the main score of each task; stored scores are reused.

    With baselines the table of the evaluation is printed, with differences and costs.

    Args:
        model: a result of `train` or `load`, or whatever `rayembed evaluate --model` takes.
        tasks: a benchmark or task of mteb by name, several of them, the folder of a set in BEIR's
            layout, or a set in memory: `{"queries": {id: text}, "corpus": {id: text}, "qrels":
            {query id: {document id: grade}}}`, whose score is nDCG@10. Ids are texts or numbers; a
            document may be `{"title": …, "text": …}`; a list or set of document ids stands for
            grades of 1; a Series is taken as the dict of its index and values.
        baselines: whether BM25 and hybrid search of both are scored beside the model on all
            retrieval tasks; their scores are returned as `"TASK, bm25"` and `"TASK, hybrid"`.
        output: folder or address of object storage for results and embeddings.
        settings: further settings by path, as those of the job's `--set`; `{"reranker.model": …}`
            with baselines adds `"TASK, reranked"` and `"TASK, hybrid-reranked"`.

    Raises:
        RayembedError: what is wrong and what to do; also when a task cannot be scored.
    """
    from rayembed.pipeline.evaluate.evaluate import evaluate as evaluate_run
    from rayembed.pipeline.evaluate.report import evaluated_table
    from rayembed.pipeline.storage import absolute_storage

    in_memory = isinstance(tasks, Mapping)
    check_addresses(
        model=model, tasks=None if in_memory else tasks, output=output, settings=settings
    )
    storage = absolute_storage(str(output))
    reference = model if isinstance(model, str | Path) else _place(model)
    asked: dict[str, Any] = {
        "model": {"reference": reference_of(reference)},
        "placement": {"storage_path": storage},
        "baselines": "all" if baselines else "none",
        **_asked(tasks, storage),
    }
    run = overridden(EvaluationRun, asked, assignments_of(settings or {}))
    with shown():
        result = evaluate_run(run)
    for _, error in result.failed:
        raise error
    further = result.scored.further
    if further:
        console().print(evaluated_table(result))
    beside = {f"{t}, {row}": s for row, one in further.items() for t, s in one.scores.items()}
    return result.scored.scores | beside


def _asked(tasks: Any, storage: str) -> dict[str, Any]:
    """Convert the argument `tasks` to evaluation settings: benchmarks, mteb tasks or the user's own
    sets.
    """
    if isinstance(tasks, Mapping):
        folder = _beir_folder(tasks, storage)
        return {"own_sets": [{"name": Path(folder).name, "path": folder}]}
    if isinstance(tasks, str | Path) and (Path(tasks) / "qrels").is_dir():
        folder = str(Path(tasks).absolute())
        return {"own_sets": [{"name": Path(folder).name, "path": folder}]}
    from rayembed.evaluation.benchmarks import benchmark_names

    names = [str(tasks)] if isinstance(tasks, str | Path) else [str(task) for task in tasks]
    known = set(benchmark_names())
    return {
        "benchmarks": [name for name in names if name in known],
        "tasks": [name for name in names if name not in known],
    }


def _beir_folder(given: Mapping[str, Any], storage: str) -> str:
    """Write an in-memory set as a folder in BEIR's layout, named by its content, and return its
    path.
    """
    from rayembed.config.document import fingerprint

    wanted = {"queries", "corpus", "qrels"}
    if set(given) != wanted:
        raise DataError(
            f"an in-memory set must have the keys {', '.join(sorted(wanted))}; given: "
            f"{', '.join(map(str, given))}"
        )
    rows: dict[str, list[dict[str, Any]]] = {
        "corpus.jsonl": [_text_row("corpus", *item) for item in _items(given["corpus"], "corpus")],
        "queries.jsonl": [
            _text_row("queries", *item) for item in _items(given["queries"], "queries")
        ],
        "qrels/test.jsonl": [
            {"query-id": query, "corpus-id": document, "score": grade}
            for asked, judged in _items(given["qrels"], "qrels")
            for query in [_id(asked, "qrels")]
            for document, grade in _grades(query, judged)
        ],
    }
    for part, keys in (("corpus", ["_id"]), ("queries", ["_id"]), ("qrels/test", _OF_JUDGEMENTS)):
        counts = Counter(tuple(row[key] for key in keys) for row in rows[f"{part}.jsonl"])
        for ids, count in counts.items():
            if count > 1:
                named = " with ".join(map(repr, ids))
                raise DataError(
                    f"{part}: {named} occurs {count} times (ids are compared as text: 1 equals "
                    "'1'); give it once"
                )
    folder = join(storage, "data", "given", f"set-{fingerprint(rows)}")
    for name, lines in rows.items():  # judgements last: a set that was begun is written again
        if not exists(join(folder, "qrels/test.jsonl")):
            write_atomic(join(folder, name), "\n".join(map(json.dumps, lines)).encode())
    return folder


def _items(given: Any, part: str) -> list[tuple[Any, Any]]:
    """Return the (id, value) pairs of a mapping or a pandas Series."""
    if hasattr(given, "items") and not hasattr(given, "columns"):
        return list(given.items())
    raise DataError(
        f"{part} of an in-memory set is {repr(given)[:80]} ({type(given).__name__}); expected a "
        "dict or a Series: texts by id, or for qrels {query id: {document id: grade}}"
    )


def _text_row(part: str, name: Any, text: Any) -> dict[str, str]:
    """Convert a document or query to a row: a text, or for a document title and text."""
    given = dict(text) if isinstance(text, Mapping) and part == "corpus" else {"text": text}
    found = {key: _as_text(value) for key, value in given.items()}
    texts = all(isinstance(t, str) and is_unicode(t) for t in found.values())
    if set(found) - {"title", "text"} or not texts:
        or_both = ", or a dict of title and text" if part == "corpus" else ""
        raise DataError(
            f"{part}: {name!r} of an in-memory set is {repr(text)[:80]}; expected a text of valid "
            f"Unicode{or_both}"
        )
    return {"_id": _id(name, part), **found}


def _as_text(value: Any) -> Any:
    """Convert a whole number to its decimal digits, as ids are read from files; return other values
    unchanged.
    """
    plain = _plain(value)
    return str(plain) if isinstance(plain, int) and not isinstance(plain, bool) else plain


def _id(value: Any, part: str) -> str:
    """Convert an id to text, as ids are read from files: texts are unchanged, numbers become their
    digits.
    """
    from rayembed.data.sources.cells import RowError, name_in

    try:
        name = name_in({"id": _plain(value)}, "id")
    except RowError:
        name = None
    if name is None or not is_unicode(name):
        raise DataError(
            f"{part} of an in-memory set has the id {repr(value)[:80]}; ids must be texts or "
            "numbers"
        )
    return name


def _grades(query: str, judged: Any) -> list[tuple[str, int]]:
    """Return a query's (document, relevance grade) pairs; documents in a list or a set have grade
    1.
    """
    where = f"qrels of the query {query!r}"
    array = hasattr(judged, "dtype") and not hasattr(judged, "items")
    if array or isinstance(judged, list | tuple | set | frozenset):
        return [(name, 1) for name in sorted(_id(one, where) for one in judged)]
    found = []
    for document, value in _items(judged, where):
        grade = _plain(value)
        whole = isinstance(grade, int) or (isinstance(grade, float) and grade.is_integer())
        if not whole or abs(grade) > _LARGEST_GRADE:
            raise DataError(
                f"{where}: the document {document!r} has the grade {repr(value)[:80]}; expected a "
                f"whole number between -{_LARGEST_GRADE} and {_LARGEST_GRADE}, True or False"
            )
        found.append((_id(document, where), int(grade)))
    return found


def _plain(value: Any) -> Any:
    """Convert a numpy scalar to the Python number or text that it holds."""
    return value.item() if hasattr(value, "dtype") and hasattr(value, "item") else value


def mine(
    pairs: Rows,
    *,
    teacher: str | Path = "all-MiniLM-L6-v2",
    num_negatives: int = 7,
    output: str | Path = "outputs",
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Add hard negatives to pairs: the teacher's most similar documents that are not positives.

    Rows of `query`, `positive` and `negatives`, the hardest first, which `train` takes; a query for
    which the rule (positive-aware, arXiv 2407.15831) accepts fewer has fewer. `positive` is a text,
    or in all rows a list where any row has several.

    Args:
        pairs: as in `train`, without scores.
        teacher: an embedding model, as `model` in `train`.
        settings: further settings by path below `mining`, such as `{"rule.kind": "…"}`.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed.data.engine.parts import read_records
    from rayembed.pipeline.data.jobs import do_steps
    from rayembed.pipeline.storage import absolute_storage

    check_addresses(teacher=teacher, output=output, settings=settings)
    storage = absolute_storage(str(output))
    mining = {"teacher": reference_of(teacher), "num_negatives": num_negatives}
    source = {"kind": "pairs", "path": rows_file(pairs, storage)}
    values = {
        "name": "mine",
        "data": {"datasets": [{"name": "pairs", "source": source, "mining": mining}]},
        "placement": {"storage_path": storage},
    }
    further = {
        f"data.datasets.pairs.mining.{name}": value for name, value in (settings or {}).items()
    }
    run = override(parse(DataRun, values), assignments_of(further))
    with shown():
        done = do_steps(run, ["pairs"], "mined")["pairs"][-1]
    records = [record for part in done.parts for record in read_records(part.path)]
    several = any(len(record.positives) > 1 for record in records)
    return [
        {
            "query": record.query,
            "positive": list(record.positives) if several else record.positives[0],
            "negatives": [n.text for n in record.negatives],
        }
        for record in records
    ]


def _place(model: "Embedder | Trained") -> str:
    return model.folder if isinstance(model, Trained) else model.reference


_DATASET = "data.datasets.corpus"


def adapt(
    model: str | Path,
    corpus: Rows,
    *,
    teacher: str | Path | None = None,
    reranker: str | Path | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    name: str | None = None,
    output: str | Path = "outputs",
    workers: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Trained:
    """Adapt an encoder to unlabelled documents, score it before and after, and register it.

    Each document gives a pair by its structure, a teacher filters these and mines hard negatives,
    and its scores are distilled. The run is that of `rayembed adapt`; the same call goes
    on where a former one stopped.

    Args:
        model: what to start from; see `train`.
        corpus: a path of files (JSONL, CSV, Parquet, or `.txt` and `.md`, each a document), a
            DataFrame, a `datasets.Dataset`, or a list of texts, of tuples (title, text) or of
            dicts. Columns are `text` and, if there are any, `title`; others are named by
            `settings`.
        teacher: embedder whose negatives and scores are learnt; None: all-MiniLM-L6-v2.
        reranker: cross-encoder whose scores are learnt in place of the teacher's.
        steps: weight updates; None: the recipe's 300.
        batch_size: pairs in a step, over all workers; None: the recipe's 32.
        name: of the run and of the registered model; None: by the settings and what the files hold.
        output: folder or address of object storage for all results.
        workers: data-parallel processes.
        settings: further settings by path, as those of a job's `--set`.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed.pipeline.storage import absolute_storage

    check_addresses(
        model=model,
        teacher=teacher,
        reranker=reranker,
        name=name,
        output=output,
        settings=settings,
    )
    storage = absolute_storage(str(output))
    given = {
        "model.backbone.path": reference_of(model),
        "placement.storage_path": storage,
        "placement.workers": workers,
        f"{_DATASET}.mining.teacher": None if teacher is None else reference_of(teacher),
        f"{_DATASET}.mining.rescoring.model": None if reranker is None else reference_of(reranker),
        "stages.adapt.steps": steps,
        "stages.adapt.batch.global_pairs": batch_size,
    }
    found = {setting: value for setting, value in given.items() if value is not None}
    path = rows_file(_documents(corpus), storage)
    return trained_by(corpus_run(path, found, settings or {}, name))


def corpus_run(
    path: str, found: Mapping[str, Any], settings: Mapping[str, Any], name: str | None
) -> Run:
    """Build the run of `adapt` for the documents at `path`.

    Args:
        path: of the documents.
        found: settings by the arguments.
        settings: further ones.
        name: of the run; None: by the settings and what the files hold.

    Raises:
        RayembedError: as `adapt`.
    """
    from rayembed.data.sources.files import list_pieces

    own: dict[str, Any] = {f"{_DATASET}.source.path": path}
    if "title" not in _columns(path):
        own[f"{_DATASET}.source.title"] = None
    assignments = assignments_of({**own, **found, **settings})
    run = override(get_recipe(OWN_CORPUS), assignments)
    if name is None:
        pieces = list_pieces(path, texts=True)
        name = default_name("corpus", run, [piece.key for piece in pieces])
    return run.model_copy(update={"name": name})


def _documents(corpus: Rows) -> Rows:
    """Convert texts or tuples to rows with the columns `title` and `text`."""
    is_table = hasattr(corpus, "column_names") or hasattr(corpus, "iloc")
    if isinstance(corpus, str | Path | Mapping) or is_table or not isinstance(corpus, Iterable):
        return corpus
    documents = list(corpus)
    for number, one in enumerate(documents):
        kind = str if isinstance(one, str) else tuple if isinstance(one, tuple) else Mapping
        pair = kind is not tuple or len(one) == 2
        if not isinstance(one, kind) or not isinstance(documents[0], kind) or not pair:
            raise DataError(
                f"document {number} is {one!r:.80}; documents are texts, tuples (title, "
                "text), or dicts, and all documents of one call must have the same type"
            )
    if documents and isinstance(documents[0], str):
        return [{"text": text} for text in documents]
    if documents and isinstance(documents[0], tuple):
        return [{"title": title, "text": text} for title, text in documents]
    return documents


def _columns(path: str) -> set[str]:
    """Names of all columns that occur in the rows; reading stops once a row has a title.

    Raises:
        DataError: there are no rows at the path.
    """
    from rayembed.data.sources.files import list_pieces
    from rayembed.data.sources.rows import Row, read_rows

    found: set[str] = set()
    for piece in list_pieces(path, versions=False, texts=True):
        rows = (row for row in read_rows(piece) if isinstance(row, Row))
        for row in rows if piece.kind == "jsonl" else islice(rows, 1):  # else all have the same
            found.update(row.values)
            if "title" in found:
                return found
    return found
