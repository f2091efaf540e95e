"""Settings of an index upgrade: the new model, how it is measured, and when a map is enough."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rayembed.config.data_run import TeacherPlacement
from rayembed.config.document import Document
from rayembed.config.types import (
    Distinct,
    ModelReference,
    PlainName,
    Reference,
    Seed,
    Share,
)
from rayembed_extras.index_upgrades.maps import MapKind

Road = Literal["auto", "compatible", "adapter", "backfill"]
"""Ways to a new model: its queries on the index as they are, a map of queries into the index, all
documents embedded again, or the recommended one."""


NO_MODEL = "none"
"""Model of what needs none: a rollback, a drop, adapters to forget."""


class UpgradeRun(Document):
    """Settings of an index upgrade to a new model."""

    name: PlainName
    """Name of the index."""
    model: ModelReference = Field(min_length=1)
    """New model: a folder, `models:/name@alias`, `hf://…`, `s3://…` or a short name."""
    old_model: ModelReference | None = None
    """Model of the index; None: the one that its record names."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type in which the new model computes."""
    instruction: str | None = None
    """Task definition before each document for the new model; None: its own; empty: none."""
    query_instruction: str | None = None
    """The same for queries."""
    dimensions: PositiveInt | None = None
    """First dimensions of the new model's vectors to keep (Matryoshka); None: all."""
    query_encoder: bool = False
    """Whether the new model embeds queries alone, for documents by the index's own model
    (docs/model_pairs.md): it is measured against that model's queries, and embeds no document."""
    queries: Reference | None = None
    """Judged queries: a folder in BEIR's layout (`queries`, `qrels`; documents are those of the
    index), or rows of `query` and `document` (id) or `positive` (text). None: first sentences of
    documents, and the new model's own results among all documents count as right."""
    documents: Reference | None = None
    """Files of the documents, as `rayembed index` had them, for a backfill and for stores that keep
    no texts. None: the texts in the store, which hold whole documents only if the index has no
    chunks."""
    split: str = "test"
    """Split whose judgements are read, from `qrels/<split>.tsv`."""
    maps: Annotated[Distinct[MapKind], Field(min_length=1)] = (
        "identity",
        "orthogonal",
        "affine",
        "low_rank",
        "mlp",
        "ranking",
    )
    """Maps to fit and measure; `identity` is no map, for the road `compatible`."""
    fit_on: Literal["both", "documents", "queries"] = "both"
    """Texts on which maps are fitted: documents, whose old vectors the index has; their first
    sentences and some words of each, embedded as queries by both models; or both. Without the old
    model documents alone."""
    fit_documents: PositiveInt = 10_000
    """Documents on which maps are fitted; at most half of the index. More keep more, above all
    between models of different kinds."""
    searched_documents: PositiveInt = 20_000
    """Documents that are searched to measure the roads; of a larger index those that queries are
    judged on, and a random sample."""
    sampled_queries: PositiveInt = 500
    """First sentences by which the best map is chosen; without `queries` as many again by which
    the roads are measured."""
    keep: Share = 0.97
    """Share of full re-embedding's recall@10 that is enough: the first of the roads `compatible`
    and `adapter` whose 95 % interval has its lower end there is recommended."""
    price_per_hour: PositiveFloat | None = None
    """Price of an hour of one worker, in any currency; None: roads are priced in hours alone."""
    seed: Seed = 0
    """Seed of samples and of the MLP's training."""
    tracking_uri: Reference | None = None
    """MLflow's address for `models:/…`; None: the SQLite file in `placement.storage_path`."""
    rows_per_part: PositiveInt = 16_384
    """Rows of a part of a backfill, after which a killed job goes on."""
    store_index: dict[str, Any] = Field(default_factory=dict)
    """Settings of the store's own approximate index for a backfill; empty: the store's defaults."""
    placement: TeacherPlacement = TeacherPlacement()

    @property
    def fits_maps(self) -> bool:
        """Whether the measurement fits a map, for which it embeds more texts."""
        return not self.query_encoder and any(kind != "identity" for kind in self.maps)
