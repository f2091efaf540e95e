"""Settings of hard-negative mining, clustering and cleaning."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from rayembed.config.backbone import DtypeSetting
from rayembed.config.data_steps import CLEANERS, Cleaner, DataStep
from rayembed.config.settings import Settings
from rayembed.config.sources import Column
from rayembed.config.table import SettingsTable, load, with_members
from rayembed.config.types import ModelReference, Reference, Share


class MiningSearch(Settings):
    """Base class of search methods that retrieve a query's candidate negatives from the
    corpus.

    Base class of the members of `MINING_SEARCHES`. This class finds the exact ones. A member that
    overrides the functions searches an index of each shard of the corpus, which is made once.
    """

    if TYPE_CHECKING:
        kind: str
        """Name in the table."""

    @property
    def approximate(self) -> bool:
        """Whether the search uses an approximate index; its recall is then measured and kept in the
        manifest.
        """
        return False

    def check(self) -> None:
        """Check the settings before any work starts.

        Raises:
            ConfigError: a library is missing that the search needs.
        """

    def index(self, vectors: Any, seed: int) -> bytes:
        """Build the index of a corpus shard as bytes; it depends only on the vectors and
        the seed.

        Args:
            vectors: (n, D) float16 unit vectors, n at least 1.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `index`")

    def open(self, index: bytes) -> Any:
        """Open an index from its bytes, for use by `find`."""
        raise TypeError(f"{type(self).__name__} does not implement the method `open`")

    def find(self, opened: Any, queries: Any, k: int) -> tuple[Any, Any]:
        """Return the best documents of each query: scores (Q, k) float32 and indices in the shard
        (Q, k) int64; missing entries have `-inf` and -1.

        Args:
            queries: (Q, D) of any float type.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `find`")


MINING_SEARCHES = SettingsTable(
    "rayembed.mining_searches",
    MiningSearch,
    (
        "rayembed.search.kinds:Exact",
        "rayembed.search.kinds:Ivf",
        "rayembed.search.kinds:Hnsw",
    ),
    default="exact",
)
"""Kinds of searches. Their modules import numpy, torch and FAISS inside functions: settings are
read before they are needed."""


class MiningRule(Settings):
    """Base class of rules that reject candidates whose scores suggest that they are
    positives.

    Base class of the members of `MINING_RULES`.
    """

    if TYPE_CHECKING:
        kind: str
        """Name in the table; the negatives that a rule lets pass are marked with it."""

    def highest_scores(self, positive_scores: Any) -> Any:
        """Compute each query's highest allowed score of a negative; candidates above it are
        rejected.

        Args:
            positive_scores: (Q,) float array, score of the lowest-scoring positive of each query by
                the model that scored the candidates. All positives are marked as relevant, so what
                scores like the lowest is as likely relevant as that one is; contrastors and
                sentence-transformers take the lowest too.

        Returns:
            (Q,) float64 array.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `highest_scores`")


MINING_RULES = SettingsTable(
    "rayembed.mining_rules",
    MiningRule,
    (
        "rayembed.data.mining.rules:TopK",
        "rayembed.data.mining.rules:PercPos",
        "rayembed.data.mining.rules:MarginPos",
        "rayembed.data.mining.rules:MaxScore",
    ),
)
"""Kinds of rules. Their modules import numpy inside functions: settings are read before it is
needed."""


EXACT_CLUSTERS = 20_000
"""Default of `ClusterConfig.exact_clusters`: 10 million pairs in clusters of 512."""


class Teacher(Settings):
    """Settings of a teacher embedding model and of its inputs. Equal settings share vectors on
    disk.
    """

    teacher: ModelReference
    """Asset reference of an embedding model (ours, sentence-transformers or transformers)."""
    max_length: PositiveInt = 128
    """Maximum tokens of a text in the teacher."""
    query_prefix: str = ""
    """Text before queries, replacing the prefix in the teacher's folder; empty keeps that one. For
    a model with an instruction template give the whole text, `Instruct: …` and what follows."""
    document_prefix: str = ""
    """Text before documents; see `query_prefix`."""

    dtype: DtypeSetting = "auto"
    """Number type of matrix products. In bfloat16, embeddings, norms and the residual stream keep
    the type of the saved weights."""


if TYPE_CHECKING:
    Rule = MiningRule
    Search = MiningSearch
else:
    Rule = MINING_RULES.union()
    Search = MINING_SEARCHES.union()

_POSITIVE_AWARE: MiningRule = load("rayembed.data.mining.rules:PercPos")()
_EXACT: MiningSearch = load("rayembed.search.kinds:Exact")()


class Corpus(Settings):
    """Settings of documents to mine negatives from, in addition to the data set's positives."""

    path: Reference
    """Path as in a source: Parquet, JSONL or CSV files with one document in each row."""
    text: Column = "text"
    """Column of the document, or several: `title+text`."""


class CrossEncoder(Settings):
    """Settings of a reranker that rescores the teacher's candidates before the mining rule is
    applied.
    """

    model: ModelReference
    """Asset reference of a cross-encoder in sentence-transformers format."""
    max_length: PositiveInt = 512
    """Tokens of query and document together."""
    dtype: DtypeSetting = "auto"
    """Number type of matrix products. In bfloat16, embeddings, norms and the residual stream keep
    the type of the saved weights, and the layers that give the score compute in float32."""


class TeacherStep(Teacher, DataStep):
    """Base class of data steps that use the vectors of one teacher."""

    least: ClassVar[tuple[str, ...]] = ("teacher=hf://owner/model",)
    done: ClassVar[str]
    """Description of the step for the model card."""
    made_by: ClassVar[str]
    """Import string of the function that makes the records, for `load`."""

    @property
    def models(self) -> Mapping[str, str]:
        """Asset reference of the teacher, by its setting."""
        return {"teacher": self.teacher}

    def treatment(self, write: Callable[[str], str]) -> str:
        """Describe the step for the model card."""
        return self.done

    def make(self, context: Any, dataset: Any, parent: Any, held_out: Any) -> Any:
        """Make the records; the held-out texts are not needed."""
        return load(self.made_by)(context, dataset, parent)


class MiningConfig(TeacherStep):
    """Settings for mining hard negatives with a teacher model, positive-aware by default (arXiv
    2407.15831).
    """

    kind: ClassVar[str] = "mining"
    folder: ClassVar[str] = "mined"
    heading: ClassVar[str] = "mining"

    further_teachers: tuple[Teacher, ...] = ()
    """More teachers. Each applies the same rule to its own candidates; negatives are taken from all
    in turn."""
    rule: Rule = _POSITIVE_AWARE
    """Rule that refuses likely positives."""
    num_negatives: PositiveInt = 7
    """Negatives kept for each query (NV-Embed, Table 11)."""
    candidates: PositiveInt = 100
    """Number of candidates that the search returns for each query."""
    skip: int = Field(default=0, ge=0)
    """Number of top ranks to skip; with `candidates` it defines the window of ranks."""
    sampling: Literal["best", "uniform", "stratified"] = "best"
    """Selection among the candidates that the rule accepts: the highest-scoring, a seeded uniform
    draw, or one seeded draw from each of as many equal shares of the ranking as negatives are
    wanted, so that a distilled model sees hard, middling and easy ones."""
    pool: Literal["corpus", "given"] = "corpus"
    """Source of candidates. `corpus`: the positives of all rows and `corpus`. `given`: only the
    negatives that a row brings, filtered by the rule (Nomic Embed v2, section 7.3)."""
    corpus: Corpus | None = None
    """Additional documents to mine from; None: only the positives of the data set."""
    near_duplicate: Share | None = 0.8
    """Jaccard similarity of word trigrams from which a candidate counts as a copy of a positive;
    None: only equal texts do."""
    rescoring: CrossEncoder | None = None
    """Cross-encoder that rescores candidates; None keeps the teacher's scores."""
    search: Search = _EXACT
    """Search method for candidates: exactly, or in an index that misses some of them, for corpora
    that are too large for products of all queries with all documents."""

    @property
    def draws_by_seed(self) -> bool:
        """Whether the seed changes the mined negatives, by sampling or by an approximate index."""
        return self.sampling != "best" or self.search.approximate

    @property
    def summary(self) -> str:
        """Summarise the step: the number of negatives, the rule and the teacher."""
        return f"{self.num_negatives} by {self.rule.kind} with {self.teacher}"

    @property
    def models(self) -> Mapping[str, str]:
        """Asset references of the teachers and the cross-encoder, by setting."""
        further = enumerate(self.further_teachers)
        models = {f"further_teachers.{place}": one.teacher for place, one in further}
        rescoring = {} if self.rescoring is None else {"rescoring.model": self.rescoring.model}
        return {"teacher": self.teacher, **models, **rescoring}

    def treatment(self, write: Callable[[str], str]) -> str:
        """Name the teacher for the model card."""
        return f"hard negatives mined with `{write(self.teacher)}`"

    def make(self, context: Any, dataset: Any, parent: Any, held_out: Any) -> Any:
        """Make the records with mined hard negatives."""
        make = load("rayembed.data.mining.mine:make_mined")
        return make(context, dataset, parent, held_out)

    @model_validator(mode="after")
    def _deep_enough(self) -> "MiningConfig":
        if self.num_negatives + self.skip > self.candidates:
            passed = f" plus skip {self.skip}" if self.skip else ""
            raise ValueError(
                f"num_negatives {self.num_negatives}{passed} exceeds candidates "
                f"{self.candidates}, the number of documents searched for each query; raise "
                "candidates"
            )
        if self.pool == "given" and (self.corpus is not None or self.skip or self.search != _EXACT):
            raise ValueError(
                "pool 'given' searches no corpus, so settings of the search have no effect: set "
                "corpus=null, skip=0 and search=exact"
            )
        return self


class ClusterConfig(TeacherStep):
    """Settings for contextual batches, made of similar pairs (arXiv 2410.02525, section 4.1)."""

    kind: ClassVar[str] = "clusters"
    folder: ClassVar[str] = "clustered"
    heading: ClassVar[str] = "clusters"
    least: ClassVar[tuple[str, ...]] = (*TeacherStep.least, "batch_pairs=512")
    done: ClassVar[str] = "in clusters"
    made_by: ClassVar[str] = "rayembed.data.clusters.cluster:make_clustered"

    batch_pairs: PositiveInt
    """Pairs of a batch; must equal the stage's `batch.global_pairs`."""
    pairs_per_cluster: PositiveInt | None = None
    """Mean cluster size; None: `batch_pairs`."""
    iterations: PositiveInt = 100
    """Iterations of k-means."""
    restarts: PositiveInt = 3
    """k-means restarts; the best objective is kept."""
    sample_per_cluster: PositiveInt = 256
    """k-means training pairs for each cluster; all pairs are assigned."""
    max_sample: PositiveInt = 1_000_000
    """Maximum number of k-means training pairs, unless it is below one for each cluster. One
    machine holds them: 20 bytes a pair and dimension of the teacher, 15 GB for a million of 768."""
    exact_clusters: PositiveInt = EXACT_CLUSTERS
    """Clusters up to which each pair and the tour are compared with all of them. More are made in
    two levels, at the square root of the cost and with a small loss."""
    packing: Literal["random", "tsp"] = "tsp"
    """Order of clusters before they are cut into batches: seeded random, or each followed by its
    nearest remaining one (greedy travelling salesman)."""
    false_negative_margin: float | None = 0.0
    """ε: within a batch, document d' is a false negative of the pair (q, d) when f(q, d') ≥ f(q, d)
    + ε by the teacher's cosine; None: no false negatives."""

    @property
    def summary(self) -> str:
        """Summarise the step: the batch size, the order of batches and the teacher."""
        return f"batches of {self.batch_pairs}, {self.packing}, by {self.teacher}"


class Containment(Settings):
    """Settings for finding benchmark texts inside longer texts by word n-grams."""

    ngram: int = Field(default=13, ge=3)
    """Number of consecutive words that a text must share with a benchmark text (13 in GPT-3, arXiv
    2005.14165, appendix C)."""
    shortest: int = Field(default=8, ge=3)
    """Minimum number of words of a benchmark text that is searched for. One of fewer words than
    `ngram` must stand in a text as a whole; of fewer than 8, as in GPT-3, many are common phrases.
    """

    @model_validator(mode="after")
    def _no_longer_than_ngram(self) -> "Containment":
        if self.shortest > self.ngram:
            raise ValueError(
                f"shortest {self.shortest} exceeds ngram {self.ngram}, so benchmark texts of "
                "fewer words than ngram would never be found; lower shortest to at most ngram"
            )
        return self


class Overlap(Settings):
    """Settings for removing rows that contain a benchmark text. Documents of `mining.corpus` that
    do are not mined, and examples of classes that do are not drawn.
    """

    tasks: tuple[Reference, ...] = Field(min_length=1)
    """mteb tasks or benchmarks whose evaluation texts are excluded from training, or files of texts
    (`.txt`, one a line; JSONL or Parquet with a column `text`)."""
    max_similarity: float | None = Field(default=0.8, gt=0.0, lt=1.0)
    """BM25 score of a query or positive for an evaluation text, relative to that text's own score
    and reduced if the query or positive is longer, above which its row is dropped
    (data/cleaning/bm25.py); None: only equal texts are."""
    contained: Containment | None = None
    """Whether to drop rows whose query or positive contains a benchmark text
    (data/cleaning/evaluation_texts.py); None: a longer text is only compared as a whole."""
    negatives: bool = False
    """Whether to remove benchmark texts from the rows' own hard negatives; the row stays."""


class CleaningConfig(Settings):
    """Settings for cleaning the converted rows. Exact duplicates are always removed.

    Removals that other packages add (`CLEANERS`) are settings beside `overlap`.
    """

    overlap: Overlap | None = None

    @property
    def cleaners(self) -> tuple[Cleaner, ...]:
        """Settings of those cleaning methods of other packages that this data set uses."""
        return tuple(asked for _, asked in self if isinstance(asked, Cleaner))


if not TYPE_CHECKING:
    CleaningConfig = with_members(CleaningConfig, CLEANERS.classes().values())
