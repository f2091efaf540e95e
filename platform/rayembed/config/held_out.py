"""Settings that choose which rows of a data set are held out from training and scored
afterwards.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from rayembed.config.settings import Settings
from rayembed.config.types import Distinct, Reference, Seed

MOST_HASHES = 10_000_000
"""Maximum number of documents that are ranked to find a held-out share of them: 160 MB."""

_Column = Annotated[str, StringConstraints(min_length=1)]
_Part = Annotated[float, Field(gt=0.0, lt=1.0)]
_Values = Distinct[Annotated[str, StringConstraints(min_length=1)]]


class _HeldOut(Settings):
    max_queries: PositiveInt = 1000
    """Maximum number of scored queries: those with the smallest seeded hash."""
    seed: Seed = 0
    """Seed of the choice. It is not the run's, so that runs with other seeds have the same
    held-out part, and scores that can be compared."""


class HeldOutFraction(_HeldOut):
    """Hold out a share of the distinct documents, with all rows that have one of them as
    positive.
    """

    kind: Literal["fraction"] = "fraction"
    share: _Part = 0.1
    """Share of the distinct documents, never more than `max_queries` of them."""

    @model_validator(mode="after")
    def _choice_fits_into_memory(self) -> "HeldOutFraction":
        if self.num_ranked > MOST_HASHES:
            raise ValueError(
                f"max_queries {self.max_queries} with share {self.share:g} needs the hashes of "
                f"{self.num_ranked:,} documents in memory, but at most {MOST_HASHES:,} are "
                "allowed; lower max_queries or raise share"
            )
        return self

    @property
    def num_ranked(self) -> int:
        """Number of documents, ordered by hash, to choose the held-out ones from: about
        `max_queries / share`.
        """
        return int(self.max_queries / self.share) + 1

    @property
    def summary(self) -> str:
        """Short description of the held-out rows."""
        return f"{self.share:.0%} of documents, at most {self.max_queries:,}"


class HeldOutGroups(_HeldOut):
    """Hold out all rows of some groups, such as customers, products or dates."""

    kind: Literal["groups"] = "groups"
    column: _Column
    """Column of the group; of a `records` source `id`, `label` or `language`."""
    share: _Part | None = None
    """Share of the groups, at least one: those with the smallest seeded hash."""
    values: _Values = ()
    """Groups by their names, in place of a share."""

    @model_validator(mode="after")
    def _one_choice(self) -> "HeldOutGroups":
        if (self.share is None) == (not self.values):
            raise ValueError(
                "set either held_out.share (of the groups) or held_out.values (of chosen groups), "
                f"not both or neither; share is {self.share}, values are {list(self.values)}"
            )
        return self

    @property
    def summary(self) -> str:
        """Short description of the held-out rows."""
        chosen = f"{len(self.values):,}" if self.share is None else f"{self.share:.0%}"
        return f"{chosen} of the groups of {self.column}"


class HeldOutIds(_HeldOut):
    """Hold out rows by their ids, for a split that exists already."""

    kind: Literal["ids"] = "ids"
    column: _Column
    """Column of the id; of a `records` source `id`, `label` or `language`."""
    values: _Values = ()
    """Ids of the held-out rows."""
    file: Reference | None = None
    """File with one id a line, in place of `values`; a relative path is taken from `data.root`."""

    @model_validator(mode="after")
    def _one_list(self) -> "HeldOutIds":
        if (self.file is None) == (not self.values):
            raise ValueError(
                "set either held_out.values (a list of ids) or held_out.file (a file of ids), not "
                "both or neither"
            )
        return self

    @property
    def summary(self) -> str:
        """Short description of the held-out rows."""
        chosen = f"those in {self.file}" if self.file else f"{len(self.values):,}"
        return f"{chosen} by {self.column}"


HeldOut = Annotated[HeldOutFraction | HeldOutGroups | HeldOutIds, Field(discriminator="kind")]


def held_out_set(dataset: str) -> str:
    """Name of the retrieval task over a data set's held-out part, in tables and results."""
    return f"{dataset}-held-out"
