"""Which role, instruction or prefix a text gets in a task.

mteb tells a text's side by its prompt type: query or document in retrieval and reranking, none in
symmetric tasks (classification, clustering, pair classification, STS, summarisation, bitext
mining). Here a text of a symmetric task is a query, as in training.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, get_args

import mteb
from mteb.abstasks.abstask import get_abstask_prompt
from mteb.abstasks.task_metadata import TaskMetadata, TaskType
from mteb.models.abs_encoder import get_prompt_name
from mteb.types import PromptType

from rayembed.config.document import fingerprint
from rayembed.config.evaluation import Prompts
from rayembed.config.instructions import instruction_in, plain_head
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.evaluation.prompt_tables import (
    INSTRUCTION_TABLES,
    base_names,
    instruction_table,
    prefix_table,
)
from rayembed.models.contract import Role

PREFIX_TABLES = ("nomic", "cde")


def role_of(prompt_type: PromptType | None) -> Role:
    """Document or query; texts of symmetric tasks are queries."""
    return "document" if prompt_type == PromptType.document else "query"


@dataclass(frozen=True)
class FolderPrompts:
    """What a model's folder says of prompts."""

    kind: str
    """Of the model's settings: `nvembed`, `biencoder`, …"""
    template: str | None = None
    """With `{instruction}`, of models that take task definitions; None: they take literal text."""
    prefixes: Mapping[Role, str] = field(default_factory=dict)
    """Before texts of each role, of models without a template."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Literal prompts by their names in `config_sentence_transformers.json`."""
    default_name: str | None = None
    """Name of the prompt that sentence-transformers takes where nothing is asked for."""
    own: bool = True
    """Whether rayembed wrote the folder. Then a prompt of a task's name stands before queries and
    texts of symmetric tasks. Prompts of others' folders are chosen as mteb does."""


@dataclass(frozen=True)
class ModelPrompts:
    """The prompts of one model under one set of settings."""

    settings: Prompts
    folder: FolderPrompts

    def __post_init__(self) -> None:
        """Refuse settings that have no effect on this model.

        Raises:
            ConfigError: a prefix, or a table of prefixes, for a model with a template.
        """
        if self.folder.template is None:
            return
        for name in ("query_prefix", "document_prefix"):
            if getattr(self.settings, name) is not None:
                raise ConfigError(
                    f"prompts.{name} is set, but the model has the instruction template "
                    f"{self.folder.template!r}, which takes task definitions; set "
                    "prompts.instructions, for documents under keys like 'SciFact-document'"
                )
        if self.table in PREFIX_TABLES:
            raise ConfigError(
                f"prompts.table = {self.table!r} puts prefixes before texts, but the model has the "
                f"instruction template {self.folder.template!r}; take one of "
                f"{', '.join(INSTRUCTION_TABLES)}, folder or none"
            )

    @property
    def table(self) -> str:
        """The settings' table; for `auto` the one that fits the model."""
        if self.settings.table != "auto":
            return self.settings.table
        if self.folder.kind in INSTRUCTION_TABLES:
            return self.folder.kind
        # Our own NomicBert has learnt the prefixes of its folder, and none of the table's others.
        if self.folder.kind == "nomic-moe" and not self.folder.own:
            return self._table_or_folder("nomic")
        return self._table_or_folder("cde") if self.folder.kind == "cde" else "folder"

    def _table_or_folder(self, table: str) -> str:
        """The table where the model's own prefixes of queries and documents are the table's."""
        published = prefix_table(table).prefixes
        fits = all(published[role] == text for role, text in self.folder.prefixes.items())
        return table if fits else "folder"

    @property
    def fingerprint(self) -> str:
        """Changes when any text could get another prompt; with the published tables' content."""
        table: object = None
        if self.table in INSTRUCTION_TABLES:
            table = asdict(instruction_table(self.table))
        elif self.table in PREFIX_TABLES:
            table = asdict(prefix_table(self.table))
        settings = self.settings.model_dump(mode="json") | {"table": self.table}
        return fingerprint([settings, asdict(self.folder), table])

    def instruction(self, metadata: TaskMetadata, prompt_type: PromptType | None) -> str:
        """What `Way.instruction` holds: a task definition for a template, else literal text."""
        role = role_of(prompt_type)
        given = self._given(metadata, role)
        if self.folder.template is not None:
            return self._definition(metadata, role) if given is None else given
        replaced = getattr(self.settings, f"{role}_prefix")
        if replaced is not None:
            return plain_head(replaced, given or self._of_table(metadata, role))
        if given is not None:
            return plain_head(self._role_prefix(metadata, prompt_type), given)
        own_words = self._of_table(metadata, role)
        if own_words:
            return plain_head(self._role_prefix(metadata, prompt_type), own_words)
        return self._prefix(metadata, prompt_type)

    def shown(self, instruction: str) -> str:
        """The literal text that stands before a text with this `Way.instruction`."""
        if self.folder.template is None or not instruction:
            return instruction
        return self.folder.template.replace("{instruction}", instruction)

    def _given(self, metadata: TaskMetadata, role: Role) -> str | None:
        """The user's task definition; None: none is given."""
        keys = [f"{metadata.name}-{role}", metadata.name, f"{metadata.type}-{role}", metadata.type]
        if role == "document":
            keys = keys[::2]
        return next(
            (self.settings.instructions[k] for k in keys if k in self.settings.instructions), None
        )

    def _definition(self, metadata: TaskMetadata, role: Role) -> str:
        """The task definition of a model with a template; none for documents."""
        if role == "document" or self.table == "none":
            return ""
        found = self._of_table(metadata, role) or self._named_definition(metadata.name)
        if found or self.table not in INSTRUCTION_TABLES:
            return found
        default: str = get_abstask_prompt(metadata.name)
        return default

    def _of_table(self, metadata: TaskMetadata, role: Role) -> str:
        """The words of an instruction table or of mteb's task; empty where neither has any."""
        if role == "document" or self.table not in INSTRUCTION_TABLES:
            return ""
        paper = instruction_table(self.table).find(metadata.name, metadata.type)
        of_task = _words_of(metadata)
        if self.settings.wording == "mteb":
            return of_task or paper
        return paper or of_task

    def _named_definition(self, name: str) -> str:
        """The task definition of a saved prompt, which is the template filled with it."""
        return instruction_in(self.folder.named.get(name, ""), self.folder.template or "")

    def _prefix(self, metadata: TaskMetadata, prompt_type: PromptType | None) -> str:
        """Literal text from a table of prefixes or from the folder."""
        if self.table == "none":
            return ""
        if self.table in PREFIX_TABLES:
            table = prefix_table(self.table)
            name = get_prompt_name(dict(table.prefixes), metadata, prompt_type)
            return table.prefixes[name] if name else table.otherwise
        if not self.folder.own:
            name = get_prompt_name(dict(self.folder.named), metadata, prompt_type)
            if name and name not in get_args(Role):
                return self.folder.named[name] or ""
        elif prompt_type != PromptType.document and metadata.name in self.folder.named:
            return self.folder.named[metadata.name]
        return self._role_prefix(metadata, prompt_type)

    def _role_prefix(self, metadata: TaskMetadata, prompt_type: PromptType | None) -> str:
        """Literal text that goes by the role alone."""
        if self.table == "none":
            return ""
        if self.table in PREFIX_TABLES:
            return self._prefix(metadata, prompt_type)
        if prompt_type is None and not self.folder.own:
            return self.folder.named.get(self.folder.default_name or "") or ""
        return self.folder.prefixes.get(role_of(prompt_type), "")


def _words_of(metadata: TaskMetadata) -> str:
    """The instruction of mteb's task, or of the task that it is a smaller or later cut of."""
    stated = metadata.prompt
    for name in base_names(metadata.name):
        if stated is None and name != metadata.name:
            stated = _known_prompt(name)
    if isinstance(stated, Mapping):
        stated = stated.get("query")
    return str(stated or "")


@cache
def _known_prompt(name: str) -> Any:
    return mteb.get_task(name).metadata.prompt if _is_task(name) else None


def check_instructions(prompts: Prompts, own_tasks: Iterable[str] = ()) -> None:
    """Return when every key of the instructions names a task of mteb's or a type of task.

    Args:
        own_tasks: names of tasks that mteb does not have.

    Raises:
        ConfigError: it does not; the message names the nearest.
    """
    own = {*get_args(TaskType), *own_tasks}
    for key in prompts.instructions:
        name = key.removesuffix("-query").removesuffix("-document")
        if {key, name} & own or _is_task(key) or _is_task(name):
            continue
        hint = nearest(name, {*own, *(task.metadata.name for task in mteb.get_tasks())})
        if hint.startswith("allowed"):
            hint = "names are those that mteb.get_tasks() lists"
        raise ConfigError(f"prompts.instructions: no task or type of task {name!r}; {hint}")


def _is_task(name: str) -> bool:
    try:
        mteb.get_task(name)
    except KeyError:
        return False
    return True
