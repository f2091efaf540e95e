"""Indexes of embedded documents as the registry, the server and `rayembed.load` know them.

Another package keeps indexes; it adds its functions by an entry point of the group
`rayembed.indexes`. A registered version names its indexes in tags `rayembed.index.<name>`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rayembed.config.table import NamedTable, load
from rayembed.config.types import Role
from rayembed.display.tables import Table, show
from rayembed.errors import ConfigError
from rayembed.registry.gates import Check
from rayembed.registry.openai_schema import cut

INDEX_TAG = "rayembed.index."
"""Begin of a version's tags that name indexes; the index's name and a JSON value follow."""

SearchMode = Literal["dense", "hybrid"]
"""`dense`: nearest vectors. `hybrid`: fused by reciprocal ranks with a search for words."""

_HEADING = "\n\n## Indexes\n\n"


class QueryAdapter(Protocol):
    """Map of a model's query vectors into the vectors of an index that another model made."""

    @property
    def kind(self) -> str:
        """Kind of the map, such as `affine`."""
        ...

    @property
    def dimensions(self) -> tuple[int, int]:
        """Dimensions of the model's vectors and of the index's."""
        ...

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Map (N, D_new) vectors to (N, D_old) float32 unit vectors."""
        ...


@dataclass(frozen=True)
class IndexSpace:
    """Vector space of an index's current table, and how one model's queries get into it."""

    name: str
    table: str
    made_by: str
    """Reference of the model that embedded the documents."""
    dimensions: int
    rows: int = 0
    instruction: str | None = None
    """Instruction before each document; None: the model's own."""
    query_instruction: str | None = None
    adapter: QueryAdapter | None = None
    """None: the model itself embedded the documents."""
    dtype: str = "float32"
    """Number type in which the documents were computed."""
    number_type: str = "float32"
    """Number type of the stored vectors."""

    def instruction_of(self, role: Role) -> str | None:
        """Instruction with which texts of a role are embedded for this index."""
        return self.query_instruction if role == "query" else self.instruction

    def check_role(self, role: Role) -> None:
        """Raise if vectors of this role cannot belong to the index.

        Raises:
            ConfigError: documents, where queries get into the index by an adapter.
        """
        if role == "document" and self.adapter is not None:
            raise ConfigError(
                f"the index {self.name!r} was made by {self.made_by}, and this model has an "
                f"adapter ({self.adapter.kind}) for queries alone: its documents do not belong to "
                "this index. Embed queries (role query), add documents by `rayembed index "
                f"--update`, or embed all by this model: rayembed upgrade --name {self.name} "
                "--model MODEL --road backfill"
            )

    def vectors(self, given: np.ndarray, role: Role) -> np.ndarray:
        """Convert the model's (N, D) unit vectors to vectors of the index, (N, dimensions).

        Raises:
            ConfigError: as `check_role`.
        """
        self.check_role(role)
        if self.adapter is None:
            return cut(given, self.dimensions)
        return self.adapter(cut(given, self.adapter.dimensions[0]))

    def described(self) -> dict[str, Any]:
        """Entry of the index in the server's list of models."""
        return {
            "name": self.name,
            "table": self.table,
            "rows": self.rows,
            "dimensions": self.dimensions,
            "made_by": self.made_by,
            "adapter": None if self.adapter is None else self.adapter.kind,
        }


class Hit(NamedTuple):
    """A row that a search in an index returns."""

    id: str
    score: float
    document: str
    chunk: int
    text: str | None
    """None: the store keeps no texts."""
    metadata: dict[str, Any]


class IndexSearch(NamedTuple):
    """Q queries to search an index for, and the form of search."""

    vectors: np.ndarray
    """(Q, dimensions) of the index."""
    texts: Sequence[str]
    """Q queries."""
    k: int
    """Rows for each query."""
    mode: SearchMode = "dense"


class NamedIndex(Protocol):
    """An index opened for one model; calls from several threads are safe."""

    @property
    def name(self) -> str:
        """Name of the index."""
        ...

    def space(self) -> IndexSpace:
        """Return the current table's space, as the record of the index has it within seconds.

        Raises:
            ConfigError: another model made the table, and there is no adapter for this one.
            ArtifactError: the record cannot be read.
        """
        ...

    def no_hybrid(self, space: IndexSpace) -> str:
        """Reason why a table cannot be searched for words; empty if it can."""
        ...

    def search(self, space: IndexSpace, wanted: IndexSearch) -> list[list[Hit]]:
        """Return the k best rows of each query, best first.

        Raises:
            RayembedError: the store does not answer.
        """
        ...

    def reconnect(self) -> None:
        """Let the next search open the store again, also while a search waits for the store."""
        ...


@dataclass(frozen=True)
class IndexFunctions:
    """Functions of a package that keeps indexes, as import strings `module:name`."""

    open: str
    """Function from storage path, index name, fingerprint of a model's weights, and the maximum
    rows of an index of words, to a `NamedIndex`; raises ConfigError where there is no index."""
    ready: str
    """Function from a `ReadyQuestion` to a `gates.Check`."""


@dataclass(frozen=True)
class ReadyQuestion:
    """Question of the gate `--index-ready`: whether an index serves queries of a version."""

    storage: str
    name: str
    weights: str
    """Fingerprint of the version's weights."""
    compatible: float | None
    """Smallest share of full re-embedding's recall with which an adapter will do; None: none."""
    reference: str
    """Reference of the version, for commands in messages."""


INDEXES = NamedTable("rayembed.indexes", IndexFunctions, "keeper of indexes", {})


def _functions() -> IndexFunctions:
    found = list(INDEXES.members().values())
    if not found:
        raise ConfigError(
            "no installed package keeps indexes; install rayembed with rayembed_extras"
        )
    return found[0]


def open_index(storage: str, name: str, weights: str, *, bm25_rows: int = 100_000) -> NamedIndex:
    """Open an index for a model.

    Args:
        weights: fingerprint of the model's weights and tokenizer.
        bm25_rows: maximum rows over which an index of words is built in memory.

    Raises:
        ConfigError: there is no such index, or no package that keeps indexes.
        ArtifactError: its record is damaged, or no table is complete.
    """
    opened: NamedIndex = load(_functions().open)(storage, name, weights, bm25_rows)
    return opened


def index_ready(question: ReadyQuestion) -> Check:
    """Check that an index serves queries of a version; its note says what to run where not."""
    check: Check = load(_functions().ready)(question)
    return check


@dataclass(frozen=True)
class IndexEntry:
    """Value of a version's tag: an index whose queries the version embeds, or embedded."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """`state` (`current`, `adapter`, `former`), `store`, `address`, `table`, `rows`, `number_type`,
    `dimensions`, `weights` (of the table), `updated`, `record` (the record's folder), and of an
    adapter `adapter` (kind) and `share` of recall."""

    @property
    def line(self) -> str:
        """One line for the terminal."""
        v = self.values
        rows = v.get("rows")
        counted = f"{rows:,} rows, " if isinstance(rows, int) else ""
        how = f"adapter {v.get('adapter')}" if v.get("state") == "adapter" else v.get("state")
        return (
            f"{self.name}: {how}, {v.get('store')} table {v.get('table')}, {counted}"
            f"{v.get('dimensions')} dimensions, {v.get('number_type')}"
        )


def entries_of(tags: Mapping[str, str]) -> list[IndexEntry]:
    """Read the indexes that a version's tags name; values that are no JSON object are left out."""
    found = []
    for key in sorted(tags):
        if key.startswith(INDEX_TAG):
            try:
                values = json.loads(tags[key])
            except ValueError:
                continue
            if isinstance(values, dict):
                found.append(IndexEntry(key.removeprefix(INDEX_TAG), values))
    return found


def index_section(tags: Mapping[str, str]) -> str:
    """Markdown section of the indexes that a version's tags name, the last one of its description;
    empty without any.
    """
    entries = entries_of(tags)
    if not entries:
        return ""
    rows = [
        [
            f"`{entry.name}`",
            str(v.get("state")) + (f" {v['adapter']}" if v.get("adapter") else ""),
            f"{v.get('store')} `{v.get('table')}`",
            v.get("rows"),
            f"{v.get('dimensions')} × {v.get('number_type')}",
            v.get("updated"),
        ]
        for entry in entries
        for v in (entry.values,)
    ]
    heads = ["index", "state", "table", "rows", "vectors", "updated"]
    table = show(Table(heads, rows, align="lllrll"), "markdown").rstrip()
    return f"{_HEADING}{table}\n"


def without_index_section(description: str) -> str:
    """Return a version's description without its section of indexes."""
    return description.partition(_HEADING)[0]
