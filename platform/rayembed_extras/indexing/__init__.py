"""Embed a corpus into a vector store, keep it current, and measure what the store returns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rayembed_extras.indexing.outcome import Indexed


def index(
    documents: Any,
    model: Any,
    name: str,
    *,
    store: str | Mapping[str, Any] = "parquet",
    to: "str | Path | None" = None,
    update: bool = False,
    output: "str | Path" = "outputs",
    settings: Mapping[str, Any] | None = None,
) -> "Indexed":
    """Embed documents into a vector store, or bring the store up to date; a call that was cut off
    goes on when it is repeated.

    Args:
        documents: a path or address of files, a list of texts, or rows: a list of dicts, a
            DataFrame or a `datasets.Dataset`, with a column `text`, and `id` where ids are known.
        model: a reference (folder, `models:/name@alias`, `hf://…`, short name), or a result of
            `rayembed.load` or `rayembed.train`.
        name: of the index, by which later calls and the store's clients find it.
        store: kind of the store, or its settings with the `kind`.
        to: address or folder of the store; None: the index's folder, or the store's own default.
        update: compare with what the index has, embed what is new or changed, and delete documents
            that are gone: `documents` are all of them.
        output: folder or address of object storage for the record of the index.
        settings: further settings by path, as those of the job's `--set`, such as
            `{"documents.metadata": ["title"], "documents.chunks.by": "sentences"}`.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed_extras.indexing.calls import index_documents

    return index_documents(
        documents,
        model,
        name,
        store=store,
        to=to,
        update=update,
        output=output,
        settings=settings or {},
    )
