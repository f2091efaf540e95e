"""Base class for settings of training data sources, and the table of their kinds.

A column is named by its name or by a path into nested cells, `answers.text`; a list on the way
gives a list, and a number leads to one element, `set.0`. `title+text` joins several fields of one
level by a space: `passages.title+text`. A line of JSONL that is a list has columns `0`, `1`, ….
Web pages often open with their title: of a text, `text.first_line` is that line and
`text.other_lines` what follows.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from rayembed.config.settings import Settings
from rayembed.config.table import SettingsTable
from rayembed.config.types import FileName, Reference

Column = Annotated[str, StringConstraints(min_length=1)]
PairRule = Literal["title", "heading", "sentence"]

DEFAULT_REJECTED_SHARE = 0.01


class Source(Settings):
    """Base class for the settings of a data source: where its rows are, and how they become
    records.

    Base class of the members of `SOURCES`. What stands here holds for a source that says nothing
    else; most members derive from `rayembed.data.sources.file_rows.FileRows`, which reads files and
    asks for the record of a row alone.
    """

    if TYPE_CHECKING:
        kind: str
        """Name in the table."""

    can_hold_out: ClassVar[bool] = False
    """Whether rows can be excluded from training for scoring."""
    held_out_columns: ClassVar[tuple[str, ...]] = ()
    """Columns by which rows can be held out; none: any column of the files."""
    is_graded: ClassVar[bool] = False
    """Whether pairs have a graded similarity and may be dissimilar."""
    has_records: ClassVar[bool] = False
    """Whether the rows are already records, with everything that an earlier job added."""
    tolerated: ClassVar[frozenset[str]] = frozenset()
    """Reasons for which valid rows are rejected; they do not count against `max_rejected_share`."""
    names_by_setting: ClassVar[Mapping[str, str]] = {}
    """Setting of a column that rows may bring → pattern of names, in small letters alone, that such
    a column plainly has; see `data.sources.unread`."""

    @property
    def paths(self) -> dict[str, str]:
        """Map settings to paths of the source's files; relative paths are joined to `data.root`."""
        return {}

    @property
    def place(self) -> str:
        """Location of the rows, as messages show it."""
        return next(iter(self.paths.values()), self.kind)

    @property
    def summary(self) -> str:
        """Kind and location of the source in a few words, for tables."""
        return f"{self.kind}: {self.place}"

    @property
    def brings_negatives(self) -> bool:
        """Whether records can have hard negatives from the source itself, without mining."""
        return False

    @property
    def most_negatives(self) -> tuple[str, int] | None:
        """Setting that limits the hard negatives of a record, with its value; None if the rows
        alone determine their number.
        """
        return None

    @property
    def draws_by_seed(self) -> bool:
        """Whether the run's seed changes the records, so that runs with other seeds cannot share
        them.
        """
        return True

    @property
    def instruction_column(self) -> str | None:
        """Column that holds an instruction for each row; None if rows have none."""
        return None

    def check(self, dataset: Any) -> Any:
        """Locate the data without converting rows; return a `ResolvedDataset`.

        Args:
            dataset: settings of the data set, a `DatasetConfig`, with whole paths.

        Raises:
            DataError, ConfigError, AssetError: as `data.sources.check.check_source`.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `check`")

    def check_names(self, setting: str) -> None:
        """Check settings that need no access to the data, such as names of mteb tasks.

        Args:
            setting: where the source stands in the settings, for messages.

        Raises:
            ConfigError: there is no such name; the message has the nearest.
        """

    def check_endpoint(self, setting: str, storage: str) -> None:
        """Check that this machine can reach the endpoint of a language model that writes
        rows.

        Args:
            setting: where the source stands in the settings, for messages.
            storage: where answers of earlier jobs lie.

        Raises:
            ConfigError: it cannot.
        """

    def written(self, context: Any, checked: Any) -> Any:
        """Write the rows of a source that generates them, as a `ResolvedDataset`; other sources
        return `checked`.

        Args:
            context: storage and seed, a `PipelineContext`.
            checked: what `check` found, which most sources give back.
        """
        return checked

    def convert(self, conversion: Any) -> list[dict[str, Any]]:
        """Convert all rows to records in the data set's folder, and return the results of the
        conversion tasks.

        Args:
            conversion: the data set, its files and where records go, a `Conversion`.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `convert`")

    def held_out_folder(self) -> str | None:
        """Folder of the held-out rows that the source has already excluded; None if it has excluded
        none.
        """
        return None


SOURCES = SettingsTable(
    "rayembed.sources",
    Source,
    (
        "rayembed.data.sources.pairs:PairsSource",
        "rayembed.data.sources.nli:NLISource",
        "rayembed.data.sources.sts:STSSource",
        "rayembed.data.sources.sts:GradedSource",
        "rayembed.data.sources.classes:ClassesSource",
        "rayembed.data.sources.beir:BeirSource",
        "rayembed.data.sources.structure:StructureSource",
        "rayembed.data.sources.earlier:RecordsSource",
    ),
)
"""Kinds of sources. A source's module imports `config.data` and what is slow to import, such as
Arrow and numpy, inside functions: settings are read before any of it is needed."""


class FileSource(Settings):
    """Base class with the settings that all file sources share."""

    path: Reference
    """A file, a folder, a prefix or a pattern (`*` within a name, `**/` over folders) of Parquet,
    JSONL, CSV or TSV files: local, `s3://…`, `gs://…`, on the hub,
    `hf://datasets/owner/name@revision/…`, or what an asset reference such as `sample://…` leads to;
    relative paths are taken from `data.root`."""
    max_rejected_share: float = Field(default=DEFAULT_REJECTED_SHARE, ge=0.0, le=1.0)
    """Maximum share of rows without the expected contents; the job fails above it."""
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Delimiter of CSV cells, such as `;`; None: a comma, in TSV files a tab."""
    encoding: FileName | None = None
    """Encoding of CSV, TSV and JSONL files, such as `latin-1`, `cp1252`, `utf-16` (not of JSONL);
    None: UTF-8."""
    quotes: Literal["csv", "none"] | None = None
    """Role of `"` in CSV and TSV files. `csv`: it stands around cells, also where their lines look
    like rows; `none`: a sign like any other, and each line is a row; None: found out, and a file
    that can be read both ways is refused."""
    language: Column | None = None
    """Column of a language code, by which batches and filters can be separated."""
