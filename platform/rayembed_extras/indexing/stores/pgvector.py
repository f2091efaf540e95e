"""Vector store `pgvector`: a PostgreSQL database with the extension pgvector."""

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from rayembed.config.table import load
from rayembed.config.types import Reference
from rayembed.errors import require_packages
from rayembed_extras.indexing.settings import NumberType, RowLimits
from rayembed_extras.indexing.stores.secret import SecretStoreSettings, SecretVariable

_OPTION = re.compile(r"[a-z][a-z0-9_]*")


class PgvectorStore(SecretStoreSettings):
    """Settings of the store `pgvector`: each table is a table of PostgreSQL, the index's name a
    view of the current one.

    `index` is `{kind: hnsw, m: 16, ef_construction: 64}` or `{kind: ivfflat, lists: 100}`; further
    keys: `distance` (`inner_product`, or `cosine` for clients that search with `<=>`), and
    PostgreSQL's `maintenance_work_mem` and `max_parallel_maintenance_workers` for its building.
    Empty: exact search.
    """

    kind: Literal["pgvector"] = "pgvector"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "bits")
    packages: ClassVar[tuple[str, ...]] = ("psycopg",)
    secret_from: ClassVar[str] = "password_from"
    # Of the primary key's index, and of a value, less the vector's share.
    limits: ClassVar[RowLimits] = RowLimits(id=2_692, texts=2**30 - 2**20)
    changeable: ClassVar[frozenset[str]] = frozenset({"index", "password_from", "connect_seconds"})

    to: Reference = "postgresql://"
    """Address of the database, `postgresql://user@host:5432/database`, without password; what it
    leaves out is read from PGHOST, PGUSER, PGDATABASE and the others of libpq."""
    password_from: SecretVariable = "PGPASSWORD"
    """Environment variable with the password, in all processes that write; where it is not set,
    libpq reads its password file (PGPASSFILE, `~/.pgpass`)."""
    schema_name: str = Field(default="public", min_length=1)
    """Schema of the tables and views; it must exist."""
    connect_seconds: PositiveInt = 10
    """Seconds to wait for a connection."""

    @field_validator("to")
    @classmethod
    def _is_of_postgresql(cls, to: str) -> str:
        if not to.startswith(("postgresql://", "postgres://")):
            raise ValueError("must begin with postgresql://, as postgresql://host/database does")
        return to

    @field_validator("number_type")
    @classmethod
    def _has_codes(cls, number_type: str) -> str:
        if number_type == "int8":
            raise ValueError(
                "pgvector has no vectors of int8; choose float16 (half the bytes of float32) or "
                "bits (a 32nd of them)"
            )
        return number_type

    @model_validator(mode="after")
    def _index_is_known(self) -> Self:
        check_index(self.index)
        return self

    def open(self) -> Any:
        """Connect to the database."""
        require_packages("the store pgvector", "indexes", *self.packages)
        return load("rayembed_extras.indexing.stores.pgvector_tables:Pgvector")(self)


def check_index(index: dict[str, Any]) -> None:
    """Check settings of an approximate index as far as no server is needed.

    Raises:
        ValueError: no such kind or distance, or a name that is no option.
    """
    if not index:
        return
    if index.get("kind") not in ("hnsw", "ivfflat"):
        raise ValueError(
            f"index.kind = {index.get('kind')!r}: must be hnsw or ivfflat; without an index, "
            "pgvector searches exactly"
        )
    if index.get("distance", "inner_product") not in ("inner_product", "cosine"):
        raise ValueError(
            f"index.distance = {index['distance']!r}: must be inner_product or cosine, which "
            "order unit vectors alike"
        )
    for name, value in index.items():
        if _OPTION.fullmatch(name) is None or not isinstance(value, str | int | float):
            raise ValueError(
                f"index.{name} = {value!r}: must be an option of pgvector's index with a number or "
                "text, such as m, ef_construction or lists"
            )
