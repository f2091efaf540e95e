"""Adapting an encoder to documents without a label, to a registered model."""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rayembed.api.calls import assignments_of, check_addresses, default_name, reference_of
from rayembed.api.training import Trained, trained_by
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.data.given_rows import Rows, rows_file
from rayembed.errors import DataError
from rayembed.recipes.catalogue import OWN_CORPUS, get_recipe

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
    """Adapt an encoder to documents without a label, score it beside its start, register it.

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
    found: dict[str, Any] = {
        "model.backbone.path": reference_of(model),
        "placement.storage_path": storage,
        "placement.workers": workers,
    }
    if teacher is not None:
        found[f"{_DATASET}.mining.teacher"] = reference_of(teacher)
    if reranker is not None:
        found[f"{_DATASET}.mining.rescoring.model"] = reference_of(reranker)
    if steps is not None:
        found["stages.adapt.steps"] = steps
    if batch_size is not None:
        found["stages.adapt.batch.global_pairs"] = batch_size
    path = rows_file(_documents(corpus), storage)
    return trained_by(corpus_run(path, found, settings or {}, name))


def corpus_run(
    path: str, found: Mapping[str, Any], settings: Mapping[str, Any], name: str | None
) -> Run:
    """The run of `adapt` over the documents at `path`.

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
    """Rows with the columns `title` and `text` of what are texts or tuples."""
    is_table = hasattr(corpus, "column_names") or hasattr(corpus, "iloc")
    if isinstance(corpus, str | Path | Mapping) or is_table or not isinstance(corpus, Iterable):
        return corpus
    documents = list(corpus)
    for number, one in enumerate(documents):
        kind = str if isinstance(one, str) else tuple if isinstance(one, tuple) else Mapping
        pair = kind is not tuple or len(one) == 2
        if not isinstance(one, kind) or not isinstance(documents[0], kind) or not pair:
            raise DataError(
                f"document {number} is {one!r:.80}; documents are texts, tuples (title, text), or "
                "dicts, all of one kind"
            )
    if documents and isinstance(documents[0], str):
        return [{"text": text} for text in documents]
    if documents and isinstance(documents[0], tuple):
        return [{"title": title, "text": text} for title, text in documents]
    return documents


def _columns(path: str) -> set[str]:
    """Columns that any row has; rows are read until one has a title.

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
