"""Tables that are files or folders in one place, local or in object storage, and the file that a
name's current table stands in.

<to>/docs_1.lance/    a table; the ending is the store's
     docs.json        the current table of the index `docs`

The stores `parquet`, `lance` and `faiss` share it.
"""

import re
import shutil
import uuid
from pathlib import Path

import pyarrow.fs

from rayembed.assets.clients import why
from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import (
    check_writable,
    exists,
    file_sizes,
    is_remote,
    join,
    open_storage,
    remove_folder,
)
from rayembed.errors import ConfigError, PlacementError, StorageError

_NUMBERED = re.compile(r"(?P<name>.+)_[1-9][0-9]*")


def index_of(table: str) -> str:
    """Name of the index that a table belongs to: `docs` of `docs_12`.

    Raises:
        ConfigError: the table has no number at its end.
    """
    match = _NUMBERED.fullmatch(table)
    if match is None:
        raise ConfigError(
            f"a table is named by its index and a number, such as docs_1, not {table!r}"
        )
    return match["name"]


class TableFolder:
    """Tables of a file store in one folder or prefix."""

    def __init__(self, to: str | None, ending: str) -> None:
        """Open a place for tables.

        Args:
            to: folder or address.
            ending: of the tables' names, such as `.lance`.

        Raises:
            ConfigError: there is no place.
        """
        if not to:
            raise ConfigError(
                "store.to is missing: give the folder or the address (s3://…) of the tables"
            )
        self.to, self._ending = to, ending

    def path(self, table: str) -> str:
        """Folder of a table."""
        index_of(table)
        return join(self.to, table + self._ending)

    def check(self) -> None:
        """Check that files can be written there.

        Raises:
            ConfigError: they cannot.
        """
        try:
            check_writable(self.to)
        except PlacementError as error:
            problem = str(error).replace("placement.storage_path", "store.to")
            raise ConfigError(problem) from error

    def tables(self, name: str) -> list[str]:
        """Tables of an index in the order of their numbers."""
        pattern = re.compile(re.escape(name) + r"_([1-9][0-9]*)" + re.escape(self._ending))
        filesystem, inside = open_storage(self.to)
        selector = pyarrow.fs.FileSelector(inside, recursive=False, allow_not_found=True)
        try:
            names = [info.base_name for info in filesystem.get_file_info(selector)]
        except OSError as error:
            raise StorageError(f"cannot list {self.to!r}: {why(error)}") from error
        numbers = sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)
        return [f"{name}_{number}" for number in numbers]

    def point(self, name: str, table: str) -> None:
        """Write the current table of a name, in one step."""
        write_json(self._pointer(name), {"table": table + self._ending})

    def pointed(self, name: str) -> str | None:
        """Current table of a name; None: the name is not used, or by a store of another kind."""
        path = self._pointer(name)
        if not exists(path):
            return None
        table = read_json(path, "Restore it, or point the name at a table again").get("table", "")
        return str(table).removesuffix(self._ending) if table.endswith(self._ending) else None

    def drop(self, table: str) -> None:
        """Remove a table's folder; locally it disappears in one step.

        Raises:
            ConfigError: the name of its index refers to it.
        """
        name = index_of(table)
        if self.pointed(name) == table:
            raise ConfigError(
                f"the index {name} refers to the table {table}; point it at another one before "
                "this one is dropped"
            )
        path = self.path(table)
        if is_remote(path):
            remove_folder(path)
            return
        folder = Path(open_storage(path)[1])
        hidden = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.dropped")
        try:
            folder.rename(hidden)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"cannot remove {path!r}: {error}") from error
        for left in folder.parent.glob(f".{folder.name}.*.dropped"):
            shutil.rmtree(left, ignore_errors=True)

    def bytes_of(self, table: str) -> int:
        """Sum the bytes of a table's files."""
        return sum(file_sizes(self.path(table), recursive=True).values())

    def _pointer(self, name: str) -> str:
        return join(self.to, f"{name}.json")
