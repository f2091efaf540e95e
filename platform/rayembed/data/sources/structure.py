"""Documents without queries: their structure gives a pair of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rayembed.config.sources import Column, PairRule
from rayembed.config.types import Seed, SortedDict
from rayembed.data.sources.building import record_of
from rayembed.data.sources.cells import RowError, name_in, text_in
from rayembed.data.sources.file_rows import NamedRows

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.records import Record
    from rayembed.data.sources.files import FilePiece
    from rayembed.data.sources.rows import Row

NO_RULE = "no rule gives a pair"


class StructureSource(NamedRows):
    """A document in each row, or in each text file, which gives one pair: its title and body, a
    heading and its section, or a sentence and the rest.

    Only one, so that no other row has the text of a held-out document.
    """

    columns_read: ClassVar = ("title", "text", "id")
    takes_texts: ClassVar = True
    can_hold_out: ClassVar = True
    tolerated: ClassVar = frozenset({NO_RULE})

    kind: Literal["structure"] = "structure"
    text: Column = "text"
    """Column of the document, or several: `lead+body`."""
    title: Column | None = "title"
    """Column of its title; None, and of text files: the first line of a text that has more."""
    rules: SortedDict[PairRule, PositiveFloat] = Field(
        default={"title": 1.0, "heading": 1.0, "sentence": 1.0}, min_length=1
    )
    """Rule → its weight, by which one is drawn of those that fit the document. `title`: title →
    body. `heading`: title and heading (Markdown, wiki) → section. `sentence`: sentence → rest."""
    min_words: PositiveInt = 5
    """Fewest words of a sentence that is a query, and of every document."""
    seed: Seed = 0
    """Seed of the draws, for each document by its text alone."""

    def check_found(self, dataset: DatasetConfig, files: Mapping[str, Sequence[FilePiece]]) -> None:
        """Check that the files have the columns; see `FileRows.check_found`."""
        from rayembed.errors import ConfigError

        try:
            super().check_found(dataset, files)
        except ConfigError as error:
            at = f"data.datasets.{dataset.name}.source.title"
            if not str(error).startswith(f"{at} "):
                raise
            raise ConfigError(
                f"{error}, or {at}=null, where texts begin with their title or have none"
            ) from None

    def records(self, dataset: DatasetConfig, row: Row) -> list[Record]:
        """The record of a document.

        Raises:
            RowError: `NO_RULE`, or a cell that is empty or of another type.
        """
        from rayembed.config.types import has_content
        from rayembed.data.sources.document_pairs import draw_pair

        values = row.values
        text = text_in(values, self.text)
        if text is None or not has_content(text):
            raise RowError("no text")
        title = (text_in(values, self.title) if self.title else None) or ""
        drawn = draw_pair(title, text, self.rules, self.seed, self.min_words)
        if drawn is None:
            raise RowError(NO_RULE)
        rule, (query, positive) = drawn
        made = record_of(
            dataset,
            query,
            [positive],
            origin=[row.origin],
            language=text_in(values, self.language) if self.language else None,
            name=name_in(values, self.id) if self.id else None,
        )
        return [replace(made, pair_rule=rule)]
