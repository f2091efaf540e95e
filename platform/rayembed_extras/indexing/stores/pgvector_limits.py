"""Limits of PostgreSQL and pgvector, checked before work."""

from rayembed.errors import ConfigError
from rayembed_extras.indexing.store import Layout

NAME_BYTES = 63
"""Bytes of a name that PostgreSQL keeps; it cuts off the rest without an error."""
LONGEST_SUFFIX = "_9999_ann"
MAX_DIMENSIONS = {"float32": 16_000, "float16": 16_000, "bits": 83_886_080}
MAX_INDEXED = {"float32": 2_000, "float16": 4_000, "bits": 64_000}
SYSTEM_COLUMNS = ("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid")
MAX_COLUMNS = 1_600


def check_limits(layout: Layout, name: str, *, has_index: bool) -> None:
    """Check names, columns and dimensions.

    Raises:
        ConfigError: PostgreSQL or pgvector does not accept them.
    """
    longest = NAME_BYTES - len(LONGEST_SUFFIX)
    if len(name.encode()) > longest:
        raise ConfigError(
            f"name = {name!r} has {len(name.encode())} bytes; PostgreSQL keeps {NAME_BYTES} of "
            f"a name, which with the tables' numbers allows {longest}"
        )
    for column in layout.metadata:
        if len(column.encode()) > NAME_BYTES:
            raise ConfigError(
                f"the metadata column {column!r} has {len(column.encode())} bytes; PostgreSQL "
                f"keeps {NAME_BYTES}: rename it in the documents"
            )
        if column in SYSTEM_COLUMNS or "\0" in column:
            raise ConfigError(
                f"the metadata column {column!r} has a name that PostgreSQL keeps for itself: "
                "rename it in the documents"
            )
    if len(layout.schema) > MAX_COLUMNS:
        raise ConfigError(
            f"{len(layout.metadata)} metadata columns: a table of PostgreSQL has {MAX_COLUMNS} "
            "columns at most; choose fewer in documents.metadata"
        )
    kind, size = layout.number_type, layout.dimensions
    if size > MAX_DIMENSIONS[kind]:
        raise ConfigError(
            f"{size:,} dimensions: pgvector stores {MAX_DIMENSIONS[kind]:,} of {kind} at most; set "
            "model.dimensions if the model was trained for fewer"
        )
    if has_index and size > MAX_INDEXED[kind]:
        raise ConfigError(
            f"{size:,} dimensions: pgvector's index takes {MAX_INDEXED[kind]:,} of {kind} at most; "
            "choose store.number_type float16 (4,000) or bits (64,000), fewer model.dimensions, or "
            "no store.index (exact search)"
        )
