"""What a teacher model is asked to do: mine hard negatives, filter pairs, cluster them."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from rayembed.config.backbone import DtypeSetting
from rayembed.config.credentials import refuse_credentials
from rayembed.config.settings import Settings
from rayembed.config.sources import Column

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Teacher(Settings):
    """An embedding model and how it sees texts. Equal settings share vectors on disk."""

    teacher: str
    """Asset reference of an embedding model (ours, sentence-transformers or transformers)."""
    max_length: PositiveInt = 128
    """Tokens of a text that the teacher sees."""
    query_prefix: str = ""
    """Before queries, in place of the one that the teacher's folder names; empty: that one. Of a
    model with an instruction template the whole text, `Instruct: …` and what follows included."""
    document_prefix: str = ""
    """As `query_prefix`, for documents."""

    dtype: DtypeSetting = "auto"
    """Number type of products with the weights. In bfloat16 embeddings, norms and the residual
    stream stay in the type in which the weights are saved."""

    _no_credentials = field_validator("teacher")(refuse_credentials)


class TopK(Settings):
    """All candidates, whatever they score."""

    kind: Literal["top_k"] = "top_k"


class PercPos(Settings):
    """Candidates up to a share of the positive's score (arXiv 2407.15831, TopK-PercPos)."""

    kind: Literal["top_k_perc_pos"] = "top_k_perc_pos"
    max_relative_score: Share = 0.95
    """A candidate that scores above this share of the positive's score is a likely positive."""


class MarginPos(Settings):
    """Candidates up to the positive's score less a margin (arXiv 2407.15831, TopK-MarginPos)."""

    kind: Literal["top_k_margin_pos"] = "top_k_margin_pos"
    margin: float = Field(default=0.05, ge=0.0, le=2.0)
    """In units of cosine."""


class MaxScore(Settings):
    """Candidates up to a fixed score (arXiv 2407.15831, TopK-Abs)."""

    kind: Literal["top_k_abs"] = "top_k_abs"
    max_score: float = Field(default=0.7, ge=-1.0, le=1.0)
    """Cosine above which a candidate is a likely positive."""


Rule = Annotated[TopK | PercPos | MarginPos | MaxScore, Field(discriminator="kind")]


class Corpus(Settings):
    """Documents to mine from beside the positives of the data set."""

    path: str
    """As `path` of a source: Parquet, JSONL or CSV files with a document a row."""
    text: Column = "text"
    """Column of the document, or several: `title+text`."""

    _no_credentials = field_validator("path")(refuse_credentials)


class CrossEncoder(Settings):
    """A reranker that scores what the teacher found; the rule then goes by its scores."""

    model: str
    """Asset reference of a cross-encoder in sentence-transformers format."""
    max_length: PositiveInt = 512
    """Tokens of query and document together."""

    _no_credentials = field_validator("model")(refuse_credentials)


class MiningConfig(Teacher):
    """Hard negatives from a teacher model, positive-aware by default (arXiv 2407.15831)."""

    further_teachers: tuple[Teacher, ...] = ()
    """Each chooses by the same rule from its own list; negatives are taken from all in turn."""
    rule: Rule = PercPos()
    """Which candidates are no likely positives."""
    num_negatives: PositiveInt = 7
    """Negatives kept for each query (NV-Embed, Table 11)."""
    candidates: PositiveInt = 100
    """Depth of the search from which negatives are taken."""
    skip: int = Field(default=0, ge=0)
    """First ranks that are passed over, counted from 0; with `candidates` the window of ranks."""
    sampling: Literal["best", "uniform"] = "best"
    """Of the candidates that the rule leaves: the highest, or a seeded uniform draw."""
    pool: Literal["corpus", "given"] = "corpus"
    """`corpus`: the positives of all rows and `corpus`. `given`: only the negatives that a row
    brings, of which the rule keeps some (Nomic Embed v2, section 7.3)."""
    corpus: Corpus | None = None
    """Further documents to mine from; None: the positives of the data set alone."""
    near_duplicate: Share | None = 0.8
    """Jaccard similarity of word trigrams from which a candidate is a copy of a positive and no
    negative; None: only equal texts are."""
    rescoring: CrossEncoder | None = None
    """None: the teacher's scores stand."""

    @model_validator(mode="after")
    def _deep_enough(self) -> "MiningConfig":
        if self.num_negatives + self.skip > self.candidates:
            passed = f" after the first {self.skip}" if self.skip else ""
            raise ValueError(
                f"num_negatives {self.num_negatives} cannot be found among candidates "
                f"{self.candidates}{passed}; raise candidates"
            )
        if self.pool == "given" and (self.corpus is not None or self.skip):
            raise ValueError("pool 'given' searches no corpus: leave corpus at null and skip at 0")
        return self


class ConsistencyConfig(Teacher):
    """Pairs are kept whose document a weak model finds by itself (Nomic Embed v2, section 4.2)."""

    top_k: PositiveInt = 2
    """A pair stays when its document is among so many best of its query's shard (2 in Nomic
    Embed v2, 20 in Arctic Embed)."""
    shard_rows: PositiveInt = 1_000_000
    """Rows of a shard, of one data set and one language."""


class ClusterConfig(Teacher):
    """Contextual batches of similar pairs (arXiv 2410.02525, section 4.1)."""

    batch_pairs: PositiveInt
    """Pairs of a batch; the stage's `batch.global_pairs` must be the same."""
    pairs_per_cluster: PositiveInt | None = None
    """Mean size of a cluster; None: `batch_pairs`."""
    iterations: PositiveInt = 100
    """Of k-means."""
    restarts: PositiveInt = 3
    """Of which the one with the best objective counts."""
    sample_per_cluster: PositiveInt = 256
    """Pairs on which k-means trains, for each cluster; all pairs are assigned."""
    max_sample: PositiveInt = 1_000_000
    """Pairs on which it trains at most, where that leaves one for each cluster. One machine holds
    them: 20 bytes a pair and dimension of the teacher, 15 GB for a million of 768."""
    packing: Literal["random", "tsp"] = "tsp"
    """How clusters stand side by side before they are cut into batches: in seeded order, or each
    followed by its nearest one that is left (greedy travelling salesman)."""
    false_negative_margin: float | None = 0.0
    """ε: in a batch a document d' is no negative of the pair (q, d) when f(q, d') ≥ f(q, d) + ε by
    the teacher's cosine; None: all are negatives."""


class NearDuplicates(Settings):
    """Rows whose text nearly is that of an earlier row are dropped (MinHash)."""

    threshold: Share = 0.8
    """Jaccard similarity of word n-grams from which two texts are the same."""
    ngram: PositiveInt = 5
    """Words of a shingle; shorter texts are one shingle."""
    permutations: int = Field(default=128, ge=16)
    """Hash functions of a signature; more find similarities near the threshold more surely."""
    of: Literal["pair", "query", "positive"] = "pair"
    """What is compared: query and first positive together, or one of them."""


class Overlap(Settings):
    """Rows with a text of a benchmark are dropped."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """mteb tasks or benchmarks whose evaluation texts must not be trained on, or files of texts
    (`.txt`, one a line; JSONL or Parquet with a column `text`)."""
    max_similarity: float | None = Field(default=0.8, gt=0.0, lt=1.0)
    """BM25 score of a query or positive for an evaluation text, relative to the score that this
    text has for itself, and lowered by how much longer the query or positive is, above which its
    row is dropped (data/cleaning/bm25.py); None: only equal texts are."""


class CleaningConfig(Settings):
    """What is taken out of the converted rows. Exact duplicates always are."""

    near_duplicates: NearDuplicates | None = None
    overlap: Overlap | None = None
