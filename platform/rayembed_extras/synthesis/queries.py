"""Write queries for documents without queries, with a language model behind an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from rayembed.config.sources import Column
from rayembed.data.sources.file_rows import FileRows, ResolvedDataset
from rayembed_extras.synthesis.endpoint_settings import AskedModel

if TYPE_CHECKING:
    from rayembed.data.engine.artifacts import PipelineContext


class QueriesSource(AskedModel, FileRows):
    """Documents, one in each row, for which a language model writes queries.

    The queries are written before anything else, as records that then replace the source.
    """

    columns_read: ClassVar = ("text",)
    takes_texts: ClassVar = True
    can_hold_out: ClassVar = True
    held_out_columns: ClassVar = ("id", "language")

    kind: Literal["queries"] = "queries"
    text: Column = "text"
    """Column of the document, or several joined: `title+text`."""
    per_document: PositiveInt = 1
    """Number of queries of a document; each becomes a row."""
    documents: PositiveInt | None = None
    """Number of documents to draw; None: all."""
    wanted: str = ""
    """Description in the prompt of the wanted queries, such as `questions of customers about an
    order`."""
    temperature: float = Field(default=0.7, ge=0.0)
    """Sampling temperature."""

    def check_endpoint(self, setting: str, storage: str) -> None:
        """Check the endpoint's key and address, unless the model has answered before."""
        from rayembed_extras.synthesis.questions import check_endpoint

        check_endpoint(self, setting, storage)

    @property
    def draws_by_seed(self) -> bool:
        """Always True, because the seed chooses the documents and the model's sampling."""
        return True

    def written(self, context: PipelineContext, checked: ResolvedDataset) -> ResolvedDataset:
        """Write queries with the model, or reuse stored ones; return the data set of their
        records.

        Raises:
            AssetError: the endpoint refuses all requests, or does not answer any more.
            DataError: no document, too many bad rows, or too many without a usable answer.
        """
        from rayembed.data.sources.earlier import RecordsSource
        from rayembed_extras.synthesis.write_queries import make_queries

        source = RecordsSource(path=make_queries(context, checked, self).folder)
        return source.check(checked.dataset.model_copy(update={"source": source}))
