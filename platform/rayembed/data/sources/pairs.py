"""Source of pairs: each row has a query and its positives."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import field_validator

from rayembed.config.sources import Column
from rayembed.data.sources.cells import name_in, text_in, texts_in
from rayembed.data.sources.file_rows import NamedRows, record_of

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.records import Record
    from rayembed.data.sources.rows import Row


class PairsSource(NamedRows):
    """A query and its positives in each row: retrieval, title–body, duplicate questions,
    cross-lingual pairs.
    """

    columns_read: ClassVar = ("query", "positive", "negatives", "label", "instruction", "id")
    can_hold_out: ClassVar = True
    names_by_setting: ClassVar = {
        "negatives": "(hard)?(neg|negative)s?((text|passage|doc|document|ctx)s?)?|rejected",
        "label": "labels?|(is)?duplicates?",
        "instruction": "instructions?|prompts?",
    }

    kind: Literal["pairs"] = "pairs"
    query: Column = "query"
    """Column of the query."""
    positive: Column = "positive"
    """Column of the positive text, or of a list of positive texts."""
    negatives: Column | tuple[Column, ...] | None = None
    """Column of a list of negative texts, or several columns (`[neg_1, neg_2]`); None: there are
    none, or they are mined. `[]`: none are read, though columns look like them."""
    label: Column | None = None
    """Column of the class; rows of one class are never negatives of each other."""
    instruction: Column | None = None
    """Column of the query's own task instruction, which replaces the data set's `query_instruction`
    (synthetic data with thousands of tasks); None without one."""
    both_directions: bool = False
    """Whether positives also serve as queries: duplicates, translations."""

    @field_validator("negatives", mode="before")
    @classmethod
    def _one_column_or_several(cls, given: Any) -> Any:
        several = list(given) if isinstance(given, list | tuple) else [given]
        if given is not None and not all(isinstance(one, str) and one for one in several):
            raise ValueError(
                "negatives must be the name of a column, or a list of column names such as [a, b]"
            )
        return given

    @property
    def columns(self) -> dict[str, str]:
        """Map each setting to the column that it names; several columns of negatives are
        `negatives[0]`, ….
        """
        columns = super().columns
        if not isinstance(self.negatives, str):
            columns |= {f"negatives[{i}]": c for i, c in enumerate(self.negatives or ())}
        return columns

    @property
    def brings_negatives(self) -> bool:
        """Whether the settings name a column of negatives."""
        return bool(self.negatives)

    @property
    def instruction_column(self) -> str | None:
        """Column with the rows' own query instructions; None if they have none."""
        return self.instruction

    def records(self, dataset: DatasetConfig, row: Row) -> list[Record]:
        """Make the record of a row; with `both_directions`, also one for each positive as the
        query.

        The latter have no negatives, as the row's were chosen for its query.

        Raises:
            RowError: the row gives none; the message says why.
        """
        values = row.values
        language = text_in(values, self.language) if self.language else None
        label = name_in(values, self.label) if self.label else None
        instruction = text_in(values, self.instruction) if self.instruction else None
        record = partial(
            record_of,
            dataset,
            origin=[row.origin],
            label=label,
            language=language,
            instruction=instruction,
        )
        texts = partial(texts_in, values, json_lists=row.json_lists)
        named = self.negatives
        columns = (named,) if isinstance(named, str) else named or ()
        negatives = [text for column in columns for text in texts(column)]
        positives = texts(self.positive)
        name = name_in(values, self.id) if self.id else None
        made = record(text_in(values, self.query), positives, negatives, name=name)
        if not self.both_directions:
            return [made]
        reverse = [
            record(positive, [made.query], name=name and f"{name}/{number}")
            for number, positive in enumerate(made.positives)
        ]
        return [made, *reverse]
