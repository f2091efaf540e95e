"""Check a run's models, instructions and tasks in the driver, before data is prepared.

A mistake that only a worker could find would be told after hours of preparation.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

from rayembed.assets.folder_formats import stated_format
from rayembed.assets.resolver import is_unpacked, resolve, resolve_model
from rayembed.config.data import DatasetConfig
from rayembed.config.evaluation import BM25, Prompts
from rayembed.config.idle import idle_settings
from rayembed.config.loss import Widths
from rayembed.config.mining import Teacher
from rayembed.config.run import Run
from rayembed.config.run_evaluation import BeirValidation, MtebValidation
from rayembed.config.stage import StageConfig
from rayembed.config.table import load
from rayembed.config.types import Role
from rayembed.data.mining.rescoring import check_cross_encoder
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.sources.check import is_here, look
from rayembed.errors import ArtifactError, AssetError, ConfigError
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.prompts import ModelPrompts
from rayembed.evaluation.prompts import check_instructions as check_task_names
from rayembed.evaluation.prompts_table import literal_prompts
from rayembed.evaluation.run_scores import own_names, run_prompts
from rayembed.evaluation.validation import check_validation, validation_prompts, validation_tasks
from rayembed.models.architecture import architecture_of
from rayembed.models.contract import PromptTokenizer
from rayembed.models.loading.build import check_buildable
from rayembed.models.loading.load import check_loadable, empty_model, saved_widths
from rayembed.models.loading.saved_prompts import saved_prompts
from rayembed.models.transformer_model import TransformerModel
from rayembed.pipeline.checks.network import check_endpoints
from rayembed.search.faiss_library import require_faiss
from rayembed.training.contrastive.engine_module import loss_parameters
from rayembed.training.contrastive.hidden_states import check_comparable
from rayembed.training.contrastive.step import stage_tokenizer
from rayembed.training.objective import Objective
from rayembed.training.optimizer import parameter_groups

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 80


def check_inputs(run: Run) -> PromptTokenizer:
    """Fetch and check every model and file that the run names, and return the model's
    tokenizer.

    Models are opened without their weights.

    Raises:
        AssetError, ArtifactError: an asset is missing, corrupt or not supported.
        ConfigError: settings that do not fit an asset.
        DataError: the evaluation's texts are too few.
    """
    folders = {name: resolve_model(at) for name, at in run.model.parts.items()}
    model = check_buildable(run.model, folders)
    tokenizer = model.tokenizer
    objective: Objective = load(architecture_of(run.model).objective)
    for stage in run.stages:
        objective.check(stage)
        widths = Widths(model.dimensions[0], _teacher_widths(stage))
        loss = loss_parameters(stage.loss, widths)
        parameter_groups(model, loss, stage.optimizer)  # whose patterns must match some weights
        _check_states(stage, model)
    check_widths(run, model.dimensions[0])
    for line in idle_settings(run):
        logger.warning("%s", line)
    check_instructions(run, tokenizer)
    for dataset in run.data.datasets:
        for path in dataset.source.paths.values():
            if is_unpacked(path):
                resolve(path)
    check_endpoints(run.used_datasets, run.placement.storage_path)
    check_teachers(run.used_datasets)
    if run.takes_scores:
        check_precisions(run)
        for place, baseline in enumerate(run.evaluation.baselines):
            if baseline != BM25:
                _check_encoder(f"evaluation.baselines.{place}", baseline)
        if (reranker := run.evaluation.reranker) is not None:
            check_cross_encoder(resolve_model(reranker.model), reranker.model)
        tasks = _tasks(run)
        settings = Prompts(instructions=run.evaluation.instructions)
        check_task_names(settings, own_names(run))
        check_prompts(tokenizer, tasks, run_prompts(run))
    if run.evaluation.validation is not None:
        check_validation(run)
        check_prompts(tokenizer, validation_tasks(run), validation_prompts(run))
    return tokenizer


def _tasks(run: Run) -> list[Any]:
    """Load the tasks that the run is scored on, without their data.

    Raises:
        AssetError: they cannot be; of the guard's general tasks the message says how to do without.
    """
    try:
        return [factory.load() for factory in task_factories(run.scores)]
    except AssetError as error:
        if run.evaluation.guard is None:
            raise
        raise AssetError(
            f"{error}\nThe general tasks of evaluation.guard need these data. To use tasks "
            "from the hub instead, set evaluation.benchmarks=[NanoBEIR]; to train without "
            "a guard, set evaluation.guard=null and evaluation.benchmarks=[]"
        ) from None


def check_prompts(tokenizer: PromptTokenizer, tasks: Sequence[Any], prompts: ModelPrompts) -> None:
    """Check that the prompts of every task leave room for a text within the maximum length.

    Raises:
        ConfigError: it does not, for a task of which the settings name no instruction.
    """
    for name, (head, *_) in literal_prompts(prompts, tasks).items():
        setting = f"the instruction of the task {name} (evaluation.instructions.{name})"
        _check_head("model", tokenizer, setting, head, "query")


def check_widths(run: Run, width: int) -> None:
    """Check that every width of a stage's loss is below the width of the model's vectors.

    Raises:
        ConfigError: one is not.
    """
    for stage in run.stages:
        stage.check_widths(width)
    learnt = {dimension for stage in run.stages for dimension in stage.loss.dimensions}
    offered = run.model.offered_dimensions or ()
    if unlearnt := [dimension for dimension in offered if dimension not in learnt]:
        logger.warning(
            "no stage of this run learns vectors cut to %s numbers, which model.dimensions "
            "offers: their quality may be low; add these widths to a stage's "
            "loss.dimensions",
            ", ".join(map(str, unlearnt)),
        )


def check_precisions(run: Run) -> None:
    """Check that FAISS, which searches in binary vectors, is installed if the run trains such
    vectors.

    Raises:
        ConfigError: FAISS is missing, which searches in bits.
    """
    if any("binary" in stage.loss.precisions for stage in run.stages):
        require_faiss("scores of binary vectors (stages.NAME.loss.precisions)")


def _teacher_widths(stage: StageConfig) -> tuple[int, ...]:
    """Fetch and check the stage's teachers, and return the widths of their vectors."""
    for place, teacher in enumerate(stage.teachers):
        _check_encoder(f"stages.{stage.name}.teachers.{place}.teacher", teacher.teacher)
    if stage.compatible_with is not None:
        _check_old_prompts(stage)
    return tuple(saved_widths(resolve_model(teacher.teacher))[0] for teacher in stage.teachers)


def _check_old_prompts(stage: StageConfig) -> None:
    """Raise if the old model, as the teacher of a compatible stage, puts another prompt before
    texts than in its index.
    """
    (teacher,) = stage.teachers
    folder = resolve_model(teacher.teacher)
    config, saved = check_loadable(folder), saved_prompts(folder)
    for role in get_args(Role):
        given = getattr(teacher, f"{role}_prefix") or config.prompt("", role)
        if saved.get(role, given) != given:
            setting = f"stages.{stage.name}.teachers.0.{role}_prefix"
            raise ConfigError(
                f"{setting}: the old model {teacher.teacher!r} puts {saved[role]!r} before each "
                f"{role}, but as a teacher {given!r}, so its vectors would not be those of the "
                f"index; set {setting}={saved[role]!r}"
            )


def _check_states(stage: StageConfig, model: TransformerModel) -> None:
    """Raise unless the stage's teacher of hidden states, if it has one, has layers that fit the
    model's.
    """
    if stage.hidden_states is not None:
        setting = f"stages.{stage.name}.hidden_states.teacher"
        _check_encoder(setting, stage.hidden_states.teacher)
        folder = resolve_model(stage.hidden_states.teacher)
        if (name := stated_format(folder)) is not None:
            raise ConfigError(
                f"{setting}: {str(folder)!r} is a model in the format {name!r}, whose "
                "layers cannot be compared; name the model that it was converted from"
            )
        check_comparable(setting, model, empty_model(folder))


def check_teachers(datasets: Iterable[DatasetConfig]) -> None:
    """Fetch every teacher and judge model of the data sets, and check that it can be
    loaded.

    Raises:
        AssetError, ArtifactError: one is missing, corrupt or not supported.
    """
    for dataset in datasets:
        path = f"data.datasets.{dataset.name}"
        for step in dataset.steps:
            if isinstance(step, Teacher):
                _check_encoder(f"{path}.{step.kind}.teacher", step.teacher)
            step.check(f"{path}.{step.kind}")
        if dataset.mining is not None:
            for place, further in enumerate(dataset.mining.further_teachers):
                _check_encoder(f"{path}.mining.further_teachers.{place}", further.teacher)
            if dataset.mining.rescoring is not None:
                reference = dataset.mining.rescoring.model
                try:
                    check_cross_encoder(resolve_model(reference), reference)
                except (AssetError, ArtifactError) as error:
                    setting = f"{path}.mining.rescoring.model"
                    raise type(error)(f"{setting} cannot be used: {error}") from None


def check_instructions(run: Run, tokenizer: PromptTokenizer) -> None:
    """Check that every instruction in the run's settings leaves room for a text within the maximum
    length.

    Raises:
        ConfigError: one does not; the message names it, its tokens, the room and what to set. Or
            there are to be in-context examples, which no instruction introduces.
    """
    for setting, instruction, role in _instructions(run):
        _check_room("model", tokenizer, setting, instruction, role)
    for stage in run.stages:
        if stage.query_max_length is None and stage.document_max_length is None:
            continue
        shorter = cast(PromptTokenizer, stage_tokenizer(stage, tokenizer))
        for dataset in run.data.datasets:
            if dataset.name in stage.datasets:
                for setting, instruction, role in _instructions_of(dataset):
                    _check_room(f"stages.{stage.name}", shorter, setting, instruction, role)
    if run.model.example_tokens:
        _check_examples(run, tokenizer)


def _check_examples(run: Run, tokenizer: PromptTokenizer) -> None:
    for stage in run.stages:
        room = cast(PromptTokenizer, stage_tokenizer(stage, tokenizer)).budget("query")
        if run.model.example_tokens >= room:
            raise ConfigError(
                f"model.examples.max_tokens is {run.model.example_tokens}, but "
                f"stages.{stage.name}.query_max_length {stage.query_max_length} has room "
                f"for {room} tokens, the query included; lower model.examples.max_tokens or "
                "raise query_max_length"
            )
    if not any(d.query_instruction or d.source.instruction_column for d in run.used_datasets):
        raise ConfigError(
            "model.examples puts in-context examples into a query's instruction, but no "
            "data set of a stage has an instruction; set "
            "data.datasets.<name>.query_instruction, or set model.examples=null"
        )


def check_instructions_at_hand(run: Run, tokenizer: PromptTokenizer) -> None:
    """Check that instructions in the first rows of local files leave room for their queries, before
    `check_row_instructions` checks all rows.

    Raises:
        ConfigError: one does not.
    """
    for dataset in run.used_datasets:
        column = dataset.source.instruction_column
        if column is not None and is_here(dataset, run.data.root):
            setting = f"column {column!r} of the data set {dataset.name!r}"
            for instruction in look(dataset, run.data.root).instructions:
                _check_room("model", tokenizer, setting, instruction, "query")


def check_row_instructions(run: Run, plans: Mapping[str, str], tokenizer: PromptTokenizer) -> None:
    """Check that every instruction in the prepared rows leaves room for its query.

    Args:
        plans: stage name → folder of its batch plan.

    Raises:
        ConfigError: one does not.
    """
    columns = {
        dataset.name: dataset.source.instruction_column
        for dataset in run.data.datasets
        if dataset.source.instruction_column is not None
    }
    for stage in run.stages:
        if not columns.keys() & stage.datasets.keys():
            continue
        for name, instruction in sorted(BatchPlan.open(plans[stage.name]).query_instructions()):
            if name in columns:
                setting = f"column {columns[name]!r} of the data set {name!r}"
                _check_room("model", tokenizer, setting, instruction, "query")


def _instructions(run: Run) -> Iterator[tuple[str, str, Role]]:
    """Yield (setting, text, role) for each instruction and prefix of the run."""
    for role in run.model.prefixes:
        yield f"model.{role}_prefix", "", role
    for dataset in run.data.datasets:
        yield from _instructions_of(dataset)
    for task, instruction in run.evaluation.instructions.items():
        yield f"evaluation.instructions.{task}", instruction, "query"
    data = None if run.evaluation.validation is None else run.evaluation.validation.data
    if isinstance(data, BeirValidation) and data.instruction:
        yield "evaluation.validation.data.instruction", data.instruction, "query"
    if isinstance(data, MtebValidation):
        for task, instruction in data.instructions.items():
            yield f"evaluation.validation.data.instructions.{task}", instruction, "query"


def _instructions_of(dataset: DatasetConfig) -> Iterator[tuple[str, str, Role]]:
    setting = f"data.datasets.{dataset.name}"
    if dataset.query_instruction:
        yield f"{setting}.query_instruction", dataset.query_instruction, "query"
    if dataset.document_instruction:
        yield f"{setting}.document_instruction", dataset.document_instruction, "document"


def _check_room(
    owner: str, tokenizer: PromptTokenizer, setting: str, instruction: str, role: Role
) -> None:
    _check_head(owner, tokenizer, setting, tokenizer.prompt(instruction, role), role)


def _check_head(
    owner: str, tokenizer: PromptTokenizer, setting: str, head: str, role: Role
) -> None:
    tokens, room = tokenizer.num_prompt_tokens(head), tokenizer.budget(role)
    if tokens < room:
        return
    cut = head if len(head) <= _SHOWN_CHARACTERS else f"{head[:_SHOWN_CHARACTERS]}…"
    length = tokenizer.max_lengths[role]
    raise ConfigError(
        f"{setting}: {cut!r} takes {tokens} tokens of the model's tokenizer, but "
        f"{owner}.{role}_max_length={length} has room for {room} tokens besides special "
        f"tokens, so no token is left for the {role} itself; shorten the text in {setting}, "
        f"or set {owner}.{role}_max_length to more than {length - room + tokens}"
    )


def _check_encoder(setting: str, reference: str) -> None:
    try:
        check_loadable(resolve_model(reference))
    except (AssetError, ArtifactError) as error:
        raise type(error)(f"{setting} cannot be used: {error}") from None
