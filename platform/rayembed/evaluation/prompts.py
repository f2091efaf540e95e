"""Decide role, instruction and prefix of each text of a task; every evaluation uses these
rules.

mteb tells a text's side by its prompt type: query or document in retrieval and reranking, none in
symmetric tasks (classification, clustering, pair classification, STS, summarisation, bitext
mining). Here a text of a symmetric task is a query, as in training.

A model that takes task definitions gets one in every task, trained or not, as mteb's own wrapper of
such models has it: the user's; else the one that its folder was saved with under the name of the
task or its type, which is that of its training; else the published one of the task; else the
general words of the task's type. Documents get what the folder says of all, which is mostly
nothing. Other models get what mteb finds in the folder: a task's, a type's, or the role's.

`prompt_tables/*.json` hold published prompts: task definitions by mteb's names of tasks, of which
one that ends in `*` stands for all that begin so, and by type; or literal prefixes by mteb's keys
(a task, a type, `query`, `document`), with that of texts which no key names. NV-Embed's table names
no CQADupstack; it has the instruction of Causal2Vec's.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from rayembed.config.document import fingerprint
from rayembed.config.evaluation import Prompts
from rayembed.config.instructions import instruction_in, literal_prompt
from rayembed.config.model import ModelConfig
from rayembed.config.settings import nearest
from rayembed.config.types import Role
from rayembed.errors import ConfigError
from rayembed.models.loading.saved_folder import SETTINGS_FILE
from rayembed.models.loading.saved_prompts import (
    given_prompts,
    prompts_to_save,
    saved_prompts,
    sentence_settings,
)

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import PromptType

INSTRUCTION_TABLES, PREFIX_TABLES = ("nvembed", "causal2vec"), ("nomic", "cde")

_VERSION = re.compile(r"(HardNegatives)?(\.v\d+)?$")
"""Suffix of mteb's task names for another cut of their data."""


@cache
def published(table: str) -> dict[str, Any]:
    """Read a table of published prompts from its file."""
    path = Path(__file__).with_name("prompt_tables") / f"{table}.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def published_instruction(table: str, task: str, task_type: str) -> str:
    """Look up the published instruction of a task, of its full-size original, or of its
    task type.
    """
    tasks, types = published(table)["tasks"], published(table)["types"]
    known = {name.lower(): text for name, text in tasks.items()}
    for name in base_names(task):
        if name.lower() in known:  # mteb writes ClimateFEVER, and NanoClimateFever
            return str(known[name.lower()])
    of_all = (t for name, t in tasks.items() if name.endswith("*") and task.startswith(name[:-1]))
    return str(next(of_all, types.get(task_type, "")))


def base_names(task: str) -> Iterator[str]:
    """Yield a task's name, then the names of the larger or earlier tasks that it derives from,
    nearest first.
    """
    yield task
    base = _VERSION.sub("", task).removeprefix("Nano")
    yield base
    yield base.removesuffix("Retrieval")


def role_of(prompt_type: "PromptType | None") -> Role:
    """Role of texts by mteb's prompt type, query or document; texts of symmetric tasks count as
    queries.
    """
    return "document" if prompt_type == "document" else "query"


@dataclass(frozen=True)
class FolderPrompts:
    """Prompts and templates saved in a model's folder."""

    table: str | None
    """Table of published prompts that fits the model's architecture; None for none."""
    template: str | None = None
    """Template with `{instruction}`, of models that take task definitions; None: they take literal
    text."""
    prefixes: Mapping[Role, str] = field(default_factory=dict)
    """Prefix for texts of each role, for models without a template."""
    in_place: str | None = None
    """Template with `{instruction}`, for models whose instruction replaces the role's prefix; None:
    the instruction follows the prefix."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Literal prompts by name from `config_sentence_transformers.json`, as sentence-transformers
    and mteb read them."""
    default_name: str | None = None
    """Name of the prompt that sentence-transformers uses by default."""
    own: bool = True
    """Whether rayembed wrote the folder. Then its names are those of data sets and tasks that
    instructions were given for, and what `prompts_to_save` adds to them."""

    @property
    def given(self) -> dict[str, str]:
        """Saved prompts by name that contain more than the role's prefix."""
        if self.own:
            return given_prompts(self.named, self.prefixes.get("query", ""))
        return {name: text for name, text in self.named.items() if name not in get_args(Role)}

    def head(self, instruction: str, role: Role) -> str:
        """Literal prompt before a text of this role, made from the instruction as the model's own
        tokenizer makes it.
        """
        template = self.in_place if self.template is None else self.template
        return literal_prompt(instruction, self.prefixes.get(role, ""), template)

    def behind(self, prefix: str, instruction: str) -> str:
        """Literal prompt made of a prefix followed by an instruction, for models without a
        template.
        """
        return literal_prompt(instruction, prefix, self.in_place)


@dataclass(frozen=True)
class ModelPrompts:
    """The prompts of one model, from the settings and the model's folder."""

    settings: Prompts
    folder: FolderPrompts

    def __post_init__(self) -> None:
        """Raise if a prompt setting has no effect on this model.

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
                    "prompts.instructions instead (keys 'SciFact', and 'SciFact-document' for "
                    "documents)"
                )
        if self.table in PREFIX_TABLES:
            raise ConfigError(
                f"prompts.table = {self.table!r} puts prefixes before texts, but the model has "
                f"the instruction template {self.folder.template!r}; set prompts.table to one of "
                f"{', '.join(INSTRUCTION_TABLES)}, folder or none"
            )

    @property
    def table(self) -> str:
        """Name of the configured table of published prompts; for `auto`, of the table that fits the
        model.
        """
        if self.settings.table != "auto":
            return self.settings.table
        table = self.folder.table
        if table in INSTRUCTION_TABLES:
            return table
        return table if table in PREFIX_TABLES and self._has_learnt(table) else "folder"

    def _has_learnt(self, table: str) -> bool:
        """Whether the model was trained with the prefixes of the configured table.

        Those of queries and documents must be its own. A folder of ours also names the prefixes of
        all data sets that it was trained with, and one that is not among them it has never seen.
        """
        known, own = published(table)["prefixes"], self.folder.prefixes
        if any(known[role] != text for role, text in own.items()):
            return False
        seen = {*own.values(), *self.folder.named.values()}
        return not self.folder.own or set(known.values()) <= seen

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all prompts, published tables included, which changes if any text could
        get another prompt.
        """
        is_published = self.table in (*INSTRUCTION_TABLES, *PREFIX_TABLES)
        table = published(self.table) if is_published else None
        settings = self.settings.model_dump(mode="json") | {"table": self.table}
        return fingerprint([settings, asdict(self.folder), table])

    def instruction(self, metadata: "TaskMetadata", prompt_type: "PromptType | None") -> str:
        """Value of `EncodeSpec.instruction` for a task: the task definition for a template, else
        the literal prompt.
        """
        role = role_of(prompt_type)
        given = self._given(metadata, role)
        if self.folder.template is not None:
            return self._definition(metadata, prompt_type) if given is None else given
        prefix = getattr(self.settings, f"{role}_prefix")
        if given is None and prefix is None:
            saved = self._saved(metadata, prompt_type) if self.folder.own else None
            if saved is not None:
                return saved
        words = self._of_table(metadata, role) if given is None else given
        if prefix is not None:
            return self.folder.behind(prefix, words)
        if given is not None or words:
            return self.folder.behind(self._role_prefix(metadata, prompt_type), words)
        return self._prefix(metadata, prompt_type)

    def shown(self, instruction: str) -> str:
        """Literal prompt before a text with the given `EncodeSpec.instruction`."""
        if self.folder.template is None or not instruction:
            return instruction
        return self.folder.template.replace("{instruction}", instruction)

    def _given(self, metadata: "TaskMetadata", role: Role) -> str | None:
        """Task definition in the user's settings, by task or task type; None if there is none."""
        keys = [f"{metadata.name}-{role}", metadata.name, f"{metadata.type}-{role}", metadata.type]
        if role == "document":
            keys = keys[::2]
        return next(
            (self.settings.instructions[k] for k in keys if k in self.settings.instructions), None
        )

    def _definition(self, metadata: "TaskMetadata", prompt_type: "PromptType | None") -> str:
        """Task definition for a model with a template; documents have the one saved in the
        folder.
        """
        if self.table == "none":
            return ""
        template = self.folder.template or ""
        if role_of(prompt_type) == "document":
            told = self._as_mteb(metadata, prompt_type) if self.folder.own else ""
            return instruction_in(told, template)
        saved = self._saved(metadata, prompt_type)
        # Empty where the run that saved it took the instruction away.
        if saved is not None and (not saved or instruction_in(saved, template)):
            return instruction_in(saved, template)
        found = self._of_table(metadata, "query")
        if found or self.table not in INSTRUCTION_TABLES:
            return found
        from mteb.abstasks.abstask import get_abstask_prompt

        default: str = get_abstask_prompt(metadata.name)
        return default

    def _saved(self, metadata: "TaskMetadata", prompt_type: "PromptType | None") -> str | None:
        """Prompt saved in the folder for the task or its type, under the name that mteb would use;
        None without one.
        """
        if self.table == "none":
            return None
        return self.folder.given.get(self._name(metadata, prompt_type))

    def _as_mteb(self, metadata: "TaskMetadata", prompt_type: "PromptType | None") -> str:
        """Prompt saved in the folder that mteb's own wrapper would use for the task; empty without
        one.
        """
        return self.folder.named.get(self._name(metadata, prompt_type)) or ""

    def _name(self, metadata: "TaskMetadata", prompt_type: "PromptType | None") -> str:
        """Name of the folder's prompt that mteb would choose for the task; empty if none
        applies.
        """
        from mteb.models.abs_encoder import get_prompt_name

        return get_prompt_name(dict(self.folder.named), metadata, prompt_type) or ""

    def _of_table(self, metadata: "TaskMetadata", role: Role) -> str:
        """Instruction for the task from a published table or from mteb, by the setting `wording`;
        empty if neither has any.
        """
        if role == "document" or self.table not in INSTRUCTION_TABLES:
            return ""
        paper = published_instruction(self.table, metadata.name, metadata.type)
        of_task = _words_of(metadata)
        if self.settings.wording == "mteb":
            return of_task or paper
        return paper or of_task

    def _prefix(self, metadata: "TaskMetadata", prompt_type: "PromptType | None") -> str:
        """Literal prefix for the task, from a table of prefixes or from the folder."""
        from mteb.models.abs_encoder import get_prompt_name

        if self.table == "none":
            return ""
        if self.table in PREFIX_TABLES:
            table = published(self.table)
            name = get_prompt_name(dict(table["prefixes"]), metadata, prompt_type)
            return str(table["prefixes"][name] if name else table["otherwise"])
        if self.folder.own:
            return self._as_mteb(metadata, prompt_type)
        found = self._saved(metadata, prompt_type)
        return self._role_prefix(metadata, prompt_type) if found is None else found

    def _role_prefix(self, metadata: "TaskMetadata", prompt_type: "PromptType | None") -> str:
        """Literal prefix that depends on the role alone, not on the task."""
        if self.table == "none":
            return ""
        if self.table in PREFIX_TABLES:
            return self._prefix(metadata, prompt_type)
        if prompt_type is None and not self.folder.own:
            return self.folder.named.get(self.folder.default_name or "") or ""
        return self.folder.prefixes.get(role_of(prompt_type), "")


def _words_of(metadata: "TaskMetadata") -> str:
    """Instruction that mteb has for a task, or else for the larger or earlier task that it derives
    from.
    """
    stated = metadata.prompt
    for name in base_names(metadata.name):
        if stated is None and name != metadata.name:
            stated = _known_prompt(name)
    if isinstance(stated, Mapping):
        stated = stated.get("query")
    return str(stated or "")


@cache
def _known_prompt(name: str) -> Any:
    import mteb

    return mteb.get_task(name).metadata.prompt if _is_task(name) else None


def check_instructions(prompts: Prompts, own_tasks: Iterable[str] = ()) -> None:
    """Check that every key of the instructions names a task or a task type of mteb.

    Args:
        own_tasks: names of tasks that mteb does not have.

    Raises:
        ConfigError: it does not; the message names the nearest.
    """
    import mteb
    from mteb.abstasks.task_metadata import TaskType

    own = {*get_args(TaskType), *own_tasks}
    for key in prompts.instructions:
        name = key.removesuffix("-query").removesuffix("-document")
        if {key, name} & own or _is_task(key) or _is_task(name):
            continue
        hint = nearest(name, {*own, *(task.metadata.name for task in mteb.get_tasks())})
        if hint.startswith("allowed"):
            hint = "names are those that mteb.get_tasks() lists"
        raise ConfigError(f"prompts.instructions: mteb has no task or task type {name!r}; {hint}")


def _is_task(name: str) -> bool:
    import mteb

    try:
        mteb.get_task(name)
    except KeyError:
        return False
    return True


def folder_prompts(folder: Path, config: ModelConfig) -> FolderPrompts:
    """Read the prompts of a folder that `load_model` accepts.

    Args:
        config: what `check_loadable` gives for the folder.
    """
    if (folder / SETTINGS_FILE).is_file():
        return replace(_of_config(config), named=saved_prompts(folder))
    stated = sentence_settings(folder)
    return replace(
        _of_config(config),
        named={name: text for name, text in (stated.get("prompts") or {}).items() if text},
        default_name=stated.get("default_prompt_name"),
        own=False,
    )


def unsaved_prompts(
    config: ModelConfig,
    instructions: Mapping[str, str],
    defaults: Mapping[Role, str] = MappingProxyType({}),
) -> FolderPrompts:
    """Prompts of a rayembed model that is not saved yet, equal to those in its future
    folder.

    Args:
        instructions: those that it would be saved with.
        defaults: its instructions by role, of texts for which nobody names one.

    Raises:
        ConfigError: an instruction has a role's name.
    """
    return replace(_of_config(config), named=prompts_to_save(config, instructions, defaults))


def _of_config(config: ModelConfig) -> FolderPrompts:
    template, prefixes = config.template, config.prefixes
    if prefixes:
        return FolderPrompts(config.prompt_table, None, prefixes, in_place=template)
    return FolderPrompts(config.prompt_table, template)
