"""Published prompts of models by task, as the data files beside this module hold them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

INSTRUCTION_TABLES = ("nvembed", "causal2vec")
"""Kinds of models whose papers print task definitions."""

_FOLDER = Path(__file__).with_name("prompt_tables")

_VERSION = re.compile(r"(HardNegatives)?(\.v\d+)?$")
"""Suffix of mteb's task names for another cut of their data."""


@dataclass(frozen=True)
class InstructionTable:
    """Task definitions by task and by type of task."""

    source: str
    tasks: Mapping[str, str]
    """Instructions by mteb's task names; a name that ends in `*` stands for all that begin so."""
    types: Mapping[str, str]

    def find(self, task: str, task_type: str) -> str:
        """The instruction of a task, of the task that it is a smaller cut of, or of its type."""
        known = {name.lower(): text for name, text in self.tasks.items()}
        for name in base_names(task):
            if name.lower() in known:  # mteb writes ClimateFEVER, and NanoClimateFever
                return known[name.lower()]
        for name, text in self.tasks.items():
            if name.endswith("*") and task.startswith(name[:-1]):
                return text
        return self.types.get(task_type, "")


@dataclass(frozen=True)
class PrefixTable:
    """Literal prefixes by mteb's keys: a task, a type of task, `query`, `document`."""

    source: str
    prefixes: Mapping[str, str]
    otherwise: str
    """Prefix of texts that no key names."""


def base_names(task: str) -> Iterator[str]:
    """The task's name and those of the tasks whose smaller or later cut it is, nearest first."""
    yield task
    base = _VERSION.sub("", task).removeprefix("Nano")
    yield base
    yield base.removesuffix("Retrieval")


@cache
def instruction_table(name: str) -> InstructionTable:
    """The published instructions of `nvembed` or `causal2vec`."""
    values = _read(name)
    return InstructionTable(values["source"], values["tasks"], values["types"])


@cache
def prefix_table(name: str) -> PrefixTable:
    """The published prefixes of `nomic` or `cde`."""
    values = _read(name)
    return PrefixTable(values["source"], values["prefixes"], values["otherwise"])


def _read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return values
