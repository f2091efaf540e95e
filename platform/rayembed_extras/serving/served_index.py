"""The index to which a served model's vectors belong, and what the server says of it."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from rayembed.errors import ConfigError, RayembedError
from rayembed.registry.indexes import Hit, IndexEntry, IndexSpace, NamedIndex, SearchMode
from rayembed.registry.openai_schema import EncodeOptions, RequestError, cut

logger = logging.getLogger(__name__)

_NAMED = ("table", "rows", "dimensions", "state", "adapter")
"""Values of a registry tag in the list of models."""


class IndexUnusableError(Exception):
    """The model does not fit its index now, or the store does not answer."""


class ServedIndex:
    """The index of a served model, if it has one, and others that the registry names."""

    def __init__(self, index: NamedIndex | None, named: Sequence[IndexEntry] = ()) -> None:
        self.index = index
        self._named = tuple(named)

    def problem(self) -> str:
        """Reason why the model does not fit its index now; empty if it does, or has none."""
        try:
            if self.index is not None:
                self.index.space()
        except RayembedError as error:
            return str(error)
        return ""

    def space(self, options: EncodeOptions) -> IndexSpace | None:
        """Space of the index, checked for a request's options; None: the model has no index.

        Raises:
            IndexUnusableError: the model does not fit the index, or its record cannot be read.
            RequestError: an adapter is in use, and the options fit no adapter.
        """
        if self.index is None:
            return None
        try:
            space = self.index.space()
        except RayembedError as error:
            raise IndexUnusableError(f"the model does not fit its index: {error}") from None
        try:
            space.check_role(options.role)
        except ConfigError as error:
            raise RequestError(str(error), "role") from None
        if options.dimensions is not None and space.adapter is not None:
            raise RequestError(
                f"dimensions = {options.dimensions}: an adapter maps queries into the index "
                f"{space.name!r}, whose vectors have {space.dimensions}; leave dimensions out",
                "dimensions",
            )
        return space

    def search(
        self,
        space: IndexSpace,
        vectors: np.ndarray,
        texts: Sequence[str],
        k: int,
        mode: SearchMode,
    ) -> list[list[Hit]]:
        """Search the index; see `NamedIndex.search`.

        Raises:
            IndexUnusableError: the store does not answer.
            RequestError: the table cannot be searched for words.
        """
        assert self.index is not None
        try:
            if mode == "hybrid" and (reason := self.index.no_hybrid(space)):
                raise RequestError(f"mode = 'hybrid': {reason}", "mode")
            return self.index.search(space, vectors, texts, k, mode)
        except RayembedError as error:
            logger.warning("the index %s cannot be searched: %s", space.name, error)
            raise IndexUnusableError(
                f"the index {space.name!r} cannot be searched: {error}"
            ) from None

    def described(self) -> list[dict[str, Any]]:
        """Entries for the list of models: the model's own index, then others of the registry."""
        entries: list[dict[str, Any]] = []
        if self.index is not None:
            try:
                entries.append({**self.index.space().described(), "serves": True})
            except RayembedError as error:
                entries.append({"name": self.index.name, "serves": False, "problem": str(error)})
        known = {entry["name"] for entry in entries}
        for entry in self._named:
            if entry.name not in known:
                values = {key: entry.values.get(key) for key in _NAMED}
                entries.append({"name": entry.name, **values, "serves": False})
        return entries


def placed(vectors: np.ndarray, options: EncodeOptions, space: IndexSpace | None) -> np.ndarray:
    """Convert the model's (N, D) unit vectors to what a request gets: of the index, or cut."""
    if space is None or options.dimensions is not None:
        return cut(vectors, options.dimensions)
    return space.vectors(vectors, options.role)


def with_instruction(options: EncodeOptions, space: IndexSpace | None) -> EncodeOptions:
    """Return a request's options with the index's instruction, unless it has its own."""
    if space is None or options.instruction is not None:
        return options
    return options._replace(instruction=space.instruction_of(options.role))


def header(space: IndexSpace | None) -> str:
    """Value of the header that names the index to which vectors belong; empty: none."""
    if space is None:
        return ""
    adapter = "" if space.adapter is None else f"; adapter={space.adapter.kind}"
    return f"{space.name}; table={space.table}{adapter}"
