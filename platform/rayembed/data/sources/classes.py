"""Source of texts with classes: positives and negatives are other texts of the classes, or the
classes' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from rayembed.config.sources import Column
from rayembed.config.types import has_content
from rayembed.data.records import Record
from rayembed.data.sources.cells import RowError, name_in, text_in
from rayembed.data.sources.file_rows import Conversion, NamedRows, record_of

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.engine.work_items import Result
    from rayembed.data.sources.rows import Row

LabelForm = Literal["example", "label"]

OTHER_CLASS = "other_class"
"""Rule name of negatives that are examples, or names, of other classes."""

ONLY_EXAMPLE = "only example of its class"


class ClassesSource(NamedRows):
    """A text and its class in each row, for classification and clustering (NV-Embed, sections 4.2,
    5.2.4).
    """

    columns_read: ClassVar = ("text", "label", "id")
    tolerated: ClassVar = frozenset({ONLY_EXAMPLE})

    kind: Literal["classes"] = "classes"
    text: Column = "text"
    label: Column = "label"
    names: dict[str, str] = Field(default_factory=dict)
    """Text of a label for columns with numbers or codes; labels not listed are used as they are."""
    label_form: LabelForm = "example"
    """Form of positives and negatives: other examples of the classes, or the classes' names. With
    two classes examples say little; use names."""
    num_negatives: PositiveInt = 7
    """Negatives from other classes for each row; fewer if there are fewer class names."""
    examples_per_class: PositiveInt = 1000
    """Size of the example pool of a class, the same for all rows: those with the smallest seeded
    hash, less those that `cleaning.overlap` finds in benchmarks."""

    @property
    def brings_negatives(self) -> bool:
        """Always true, since examples of other classes become hard negatives."""
        return True

    @property
    def most_negatives(self) -> tuple[str, int]:
        """Name of the setting that limits each row's hard negatives, and its value."""
        return "source.num_negatives", self.num_negatives

    def convert(self, conversion: Conversion) -> list[Result]:
        """Collect examples of all classes, and draw each row's positive and negatives from them."""
        from rayembed.assets.storage import join
        from rayembed.data.sources import class_examples as tasks

        folder = join(conversion.writer.working_folder, "examples")
        seed, pieces = conversion.context.seed, conversion.files["path"]
        read = ((self.text, self.label), self.text_and_class)
        by_example = self.label_form == "example"
        limit = self.examples_per_class if by_example else 0
        collect = tasks.CollectExamples(folder, *read, limit, conversion.held_out, seed)
        pools = [result["pool"] for result in conversion.prepare("examples", collect, pieces)]
        pool = tasks.merge_examples(folder, pools, self.examples_per_class)
        further = ""
        if by_example:
            pool = conversion.without_overlap(pool)
            find = tasks.FindFurtherClasses(folder, *read, pool, seed)
            found = conversion.prepare("classes", find, pieces)
            further = tasks.merge_further(folder, [one["further"] for one in found])
        draw = _DrawRecord(self, conversion.dataset, pool, further, seed)
        return self.convert_rows(conversion, draw)

    def text_and_class(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return the text and the class name of a row.

        Raises:
            RowError: one of them is missing, of another type, or the row is of several classes.
        """
        text = text_in(row, self.text)
        if text is None or not has_content(text):
            raise RowError("the text is missing or empty")
        label = name_in(row, self.label)
        if label is None:
            raise RowError("the class is missing")
        return text, self.names.get(label, label)


@dataclass(frozen=True)
class _DrawRecord:
    """Makes the record of a classification text, drawing examples that depend only on seed, data
    set and text.
    """

    source: ClassesSource
    dataset: DatasetConfig
    pool: str
    further: str
    seed: int

    def __call__(self, row: Row) -> list[Record]:
        from rayembed.data.sources.class_examples import (
            example_of,
            open_examples,
            other_classes,
            other_examples,
        )

        source, values = self.source, row.values
        names = tuple(sorted(source.names.values()))
        examples = open_examples(self.pool, self.further, self.seed, names)
        text, name = source.text_and_class(values)
        language = text_in(values, source.language) if source.language else None
        key = f"{self.dataset.name}/{text}"  # another data set draws other examples
        if source.label_form == "label":
            positive = name
            negatives = list(other_classes(examples, name, key, source.num_negatives))
        else:
            example = example_of(examples, name, text, key)
            if example is None:
                raise RowError(ONLY_EXAMPLE)
            positive = example
            taken = {text, positive}
            negatives = other_examples(examples, name, taken, key, source.num_negatives)
        made = record_of(
            self.dataset,
            text,
            [positive],
            negatives,
            origin=[row.origin],
            rule=OTHER_CLASS,
            label=name,
            language=language,
            name=name_in(values, source.id) if source.id else None,
        )
        return [made]
