"""Ablations of the papers as modified runs, and ablations of the quickstarts as recipes."""

from collections.abc import Mapping, Sequence

from rayembed.config.instructions import instruction_with_examples
from rayembed.config.run import Run
from rayembed.config.settings import changed
from rayembed.errors import ConfigError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.causal2vec.config import Causal2VecConfig, ExamplesConfig
from rayembed.models.cde.config import CDEConfig
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.recipes import causal2vec, cde, nomic, nvembed

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "WikiSentenceRetrieval": (
        (
            "Its keeper lights the lamp at dusk, and ships have steered by it for two centuries.",
            "A lighthouse stands on the northern cape. It was built of granite and is open to "
            "visitors in summer.",
        ),
    ),
    "WikiDescriptionRetrieval": (
        (
            "Instrument with strings",
            "The lute is plucked with the fingers. It came to Europe in the Middle Ages and was "
            "played at courts.",
        ),
    ),
}
"""Fixed in-context examples of the quickstart's evaluation, written for it."""


def nvembed_single_stage() -> Run:
    """NV-Embed's quickstart in one stage, with only the hard negatives of each query."""
    return single_stage(nvembed.quickstart(), "nvembed-quickstart-single-stage", in_batch=False)


def nvembed_in_batch() -> Run:
    """NV-Embed's quickstart in one stage, with in-batch negatives."""
    return single_stage(
        nvembed.quickstart(), "nvembed-quickstart-single-stage-in-batch", in_batch=True
    )


def nvembed_reversed() -> Run:
    """NV-Embed's quickstart with its two stages in reversed order."""
    return reversed_stages(nvembed.quickstart(), "nvembed-quickstart-reversed")


def single_stage(run: Run, name: str, *, in_batch: bool) -> Run:
    """Copy a run with only its last stage, which gets as many steps as all stages had
    together.

    Table 4, "Single Stage (Inbatch Enabled)" and "(Inbatch Disabled)". The paper does not say how
    long those were trained; here they see as many steps as the two stages. The learning rate is
    that of the first stage, from which it decays once.
    """
    first, last = run.stages[0], run.stages[-1]
    stage = changed(
        last,
        name="single",
        steps=sum(stage.steps for stage in run.stages),
        batch=changed(last.batch, in_batch_negatives=in_batch),
        optimizer=first.optimizer,
    )
    return changed(run, name=name, stages=(stage,))


def reversed_stages(run: Run, name: str) -> Run:
    """Copy a run with its two stages in reversed order.

    Table 4, "Reversed Two Stage": all data without in-batch negatives first, retrieval with them
    afterwards. Data, batch and number of steps go with the stage, the optimiser with the place. The
    paper goes on from its "Single Stage (Inbatch Disabled)" model (section 5.2.1), which here has
    seen as many steps as both stages: these rows have all had the same number.

    Raises:
        ConfigError: the run does not have two stages.
    """
    if len(run.stages) != 2:
        raise ConfigError(
            f"the order of stages can be reversed only in a run with two stages; {run.name!r} has "
            f"{len(run.stages)}"
        )
    first, last = run.stages
    stages = (
        changed(last, optimizer=first.optimizer),
        changed(first, optimizer=last.optimizer),
    )
    return changed(run, name=name, stages=stages)


def causal2vec_last_token() -> Run:
    """Causal2Vec's quickstart without the encoder: the LLM with last-token pooling, trained the
    same way.
    """
    return last_token(causal2vec.quickstart(), "causal2vec-quickstart-last-token")


def causal2vec_examples() -> Run:
    """Causal2Vec's quickstart with short in-context examples before queries; takes about twice as
    long.
    """
    limits = ExamplesConfig(max_examples=2, query_tokens=24, response_tokens=32, max_tokens=160)
    return with_examples(
        causal2vec.quickstart(), "causal2vec-quickstart-icl", limits, EXAMPLES, query_max_length=224
    )


def last_token(run: Run, name: str) -> Run:
    """Copy a Causal2Vec run without its encoder, with last-token pooling of the LLM (Tables 2, 3
    and 6).

    Raises:
        ConfigError: the run is not of Causal2Vec.
    """
    model = changed(_causal2vec(run), encoder=None, representation="eos")
    return changed(run, name=name, model=model)


def with_examples(
    run: Run,
    name: str,
    limits: ExamplesConfig,
    fixed: Mapping[str, Sequence[tuple[str, str]]],
    *,
    query_max_length: int,
) -> Run:
    """Copy a run with in-context examples: sampled in training, a fixed set for each task in
    evaluation.

    Args:
        fixed: pairs of query and positive by the name of a task, which has an instruction.

    Raises:
        ConfigError: the run is not of Causal2Vec, or a task has no instruction.
    """
    model = changed(_causal2vec(run), examples=limits, query_max_length=query_max_length)
    instructions = dict(run.evaluation.instructions)
    for task, pairs in fixed.items():
        if task not in instructions:
            raise ConfigError(
                f"in-context examples are set for the task {task!r}, which has no instruction; "
                f"set evaluation.instructions.{task}, or leave the examples out"
            )
        template = model.instruction_template
        instructions[task] = instruction_with_examples(template, instructions[task], pairs)
    evaluation = changed(run.evaluation, instructions=instructions)
    return changed(run, name=name, model=model, evaluation=evaluation)


def _causal2vec(run: Run) -> Causal2VecConfig:
    if not isinstance(run.model, Causal2VecConfig):
        raise ConfigError(
            f"this ablation needs a run of a 'causal2vec' model, but {run.name!r} is a run of "
            f"{run.model.kind!r}"
        )
    return run.model


def cde_filtered() -> Run:
    """A plain bi-encoder trained with the clustered batches and the false-negative filter of CDE's
    quickstart.
    """
    run = cde.quickstart()
    assert isinstance(run.model, CDEConfig)
    model = BiEncoderConfig(
        backbone=run.model.backbone,
        query_prefix=run.model.query_prefix,
        document_prefix=run.model.document_prefix,
        query_max_length=run.model.query_max_length,
        document_max_length=run.model.document_max_length,
    )
    return changed(run, name="cde-quickstart-filtered", model=model)


def cde_clustered() -> Run:
    """A plain bi-encoder on clustered batches without the filter: every other document of a batch
    is a negative.
    """
    run = cde_filtered()
    datasets = tuple(
        changed(dataset, clusters=changed(dataset.clusters, false_negative_margin=None))
        for dataset in run.data.datasets
        if dataset.clusters is not None
    )
    data = changed(run.data, datasets=datasets)
    return changed(run, name="cde-quickstart-clustered", data=data)


def cde_random() -> Run:
    """A plain bi-encoder on random batches, each from one data set, as control for CDE's
    quickstart.
    """
    run = cde_filtered()
    datasets = tuple(changed(dataset, clusters=None) for dataset in run.data.datasets)
    stages = tuple(
        changed(stage, batch=changed(stage.batch, policy="homogeneous")) for stage in run.stages
    )
    data = changed(run.data, datasets=datasets)
    return changed(run, name="cde-quickstart-random", data=data, stages=stages)


def nomic_dense() -> Run:
    """Nomic's quickstart without experts, trained the same way."""
    return dense(nomic.quickstart(), "nomic-quickstart-dense")


def dense(run: Run, name: str) -> Run:
    """Copy a run with dense MLPs in place of experts, for comparison at equal steps.

    Raises:
        ConfigError: the run is not of a nomic-moe.
    """
    if not isinstance(run.model, NomicMoeConfig):
        raise ConfigError(
            f"this ablation needs a run of a 'nomic-moe' model, but {run.name!r} is a run of "
            f"{run.model.kind!r}"
        )
    return changed(run, name=name, model=changed(run.model, experts=None))
