"""The index to which a served model's vectors belong, and what the server says of it."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rayembed.errors import ConfigError, RayembedError
from rayembed.registry.indexes import Hit, IndexEntry, IndexSearch, IndexSpace, NamedIndex
from rayembed.registry.openai_schema import EncodeOptions, RequestError, cut

logger = logging.getLogger(__name__)

_NAMED = ("table", "rows", "dimensions", "state", "adapter")
"""Values of a registry tag in the list of models."""

_FORMATS = {"int8": ("int8",), "bits": ("ubinary",)}
"""Encoding formats that an index of a number type takes; of the others floats."""


class IndexUnusableError(Exception):
    """The model does not fit its index now, or the store does not answer."""


class ServedIndex:
    """The index of a served model, if it has one, and others that the registry names."""

    def __init__(
        self,
        index: NamedIndex | None,
        named: Sequence[IndexEntry] = (),
        *,
        search_seconds: float,
    ) -> None:
        """Describe the index of a served model.

        Args:
            search_seconds: time after which a search that has not ended is given up.
        """
        self.index = index
        self._named = tuple(named)
        self._search_seconds = search_seconds
        self._thread = ThreadPoolExecutor(1, "search")
        self._began: float | None = None
        """Start of the running search."""

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
            raise IndexUnusableError(str(error)) from None
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

    def search(self, space: IndexSpace, wanted: IndexSearch) -> list[list[Hit]]:
        """Search the index; see `NamedIndex.search`.

        Raises:
            IndexUnusableError: the store does not answer.
            RequestError: the table cannot be searched for words.
        """
        assert self.index is not None
        try:
            if wanted.mode == "hybrid" and (reason := self.index.no_hybrid(space)):
                raise RequestError(f"mode = 'hybrid': {reason}", "mode")
            return self.index.search(space, wanted)
        except RayembedError as error:
            logger.warning("the index %s cannot be searched: %s", space.name, error)
            raise IndexUnusableError(
                f"the index {space.name!r} cannot be searched: {error}"
            ) from None

    async def in_search_thread(self, work: Callable[[], bytes]) -> bytes:
        """Run a search after the former ones, in a thread that no other request waits for.

        A thread whose store does not answer is left alone after `search_seconds`, and the search
        connects to the store again.
        """
        if self._began is not None and time.monotonic() - self._began > self._search_seconds:
            logger.warning("a search has not ended after %g seconds", self._search_seconds)
            self._thread, self._began = ThreadPoolExecutor(1, "search"), None
            if self.index is not None:
                self.index.reconnect()
        thread = self._thread

        def timed() -> bytes:
            if thread is not self._thread:
                raise IndexUnusableError("the store did not answer a search before this one")
            self._began = time.monotonic()
            try:
                return work()
            finally:
                if thread is self._thread:
                    self._began = None

        return await asyncio.get_running_loop().run_in_executor(thread, timed)

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


def fits(options: EncodeOptions, space: IndexSpace) -> bool:
    """Whether a request's options give vectors as the index's store takes them: dimensions and
    number type.
    """
    formats = _FORMATS.get(space.number_type, ("float", "base64"))
    width = options.dimensions in (None, space.dimensions)
    return width and options.encoding_format in formats


def header(space: IndexSpace) -> str:
    """Value of the header that names the index to which vectors belong."""
    adapter = "" if space.adapter is None else f"; adapter={space.adapter.kind}"
    return f"{space.name}; table={space.table}{adapter}"
