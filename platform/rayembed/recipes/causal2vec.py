"""Runs of Causal2Vec (arXiv 2507.23386) for a laptop.

The ablations are settings of any run: `model.num_contextual_tokens` (Table 5),
`model.position` (14), `model.representation` (2, 4, 12), `model.mask` (15), `model.encoder.path`
(6), `model.encoder.frozen` with `model.encoder.lora` (10), `model.backbone.path` (11). Plain
last-token pooling (Tables 2, 3 and 6) is `model.encoder=null` with `model.representation=eos`.
"""

from collections.abc import Mapping, Sequence

from rayembed.config.backbone import BackboneConfig, LoraConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.instructions import instruction_with_examples
from rayembed.config.run import Run
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.errors import ConfigError
from rayembed.losses.infonce import InfoNCE
from rayembed.models.causal2vec.config import Causal2VecConfig, EncoderConfig, ExamplesConfig
from rayembed.optim.adamw import AdamW
from rayembed.recipes.building_blocks import (
    compared_scores,
    on_a_laptop,
)
from rayembed.recipes.sample import (
    DESCRIPTION_TASK,
    EVALUATION_INSTRUCTIONS,
    MINILM,
    SENTENCE_TASK,
    SMOLLM2,
    Wikipedia,
)

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

ENCODER_LAYERS = ("query", "key", "value", "dense")
"""Linear layers of BERT, the architecture of E5 and all-MiniLM."""


def quickstart() -> Run:
    """SmolLM2-135M beside all-MiniLM on Wikipedia summaries: minutes on two CPU cores.

    Smaller than the paper's in every size, and without dropout in LoRA and hard negatives, which
    cost as much as they do in NV-Embed's quickstart. The learning rate is that of few steps.
    """
    sample = Wikipedia()
    max_length = 64
    return Run(
        name="causal2vec-quickstart",
        model=Causal2VecConfig(
            backbone=BackboneConfig(path=SMOLLM2),
            encoder=EncoderConfig(
                path=MINILM,
                frozen=False,
                lora=LoraConfig(rank=16, alpha=32, dropout=0.0, target_modules=ENCODER_LAYERS),
                max_length=max_length,
            ),
            lora=LoraConfig(rank=16, alpha=32, dropout=0.0),
            prompt_start="<|im_start|>user\n",
            query_max_length=max_length,
            document_max_length=max_length,
        ),
        data=DataConfig(
            datasets=(
                DatasetConfig(
                    name="wiki-description",
                    source=sample.pairs("description"),
                    query_instruction=DESCRIPTION_TASK,
                    num_samples=1000,
                ),
                DatasetConfig(
                    name="wiki-sentence",
                    source=sample.pairs("sentence"),
                    query_instruction=SENTENCE_TASK,
                    num_samples=1500,
                ),
            ),
        ),
        stages=(
            StageConfig(
                name="retrieval",
                datasets={"wiki-description": 1.0, "wiki-sentence": 2.0},
                batch=BatchConfig(
                    policy="homogeneous",
                    global_pairs=32,
                    num_negatives=0,
                    in_batch_negatives=True,
                ),
                loss=InfoNCE(temperature=0.05),
                optimizer=AdamW(learning_rate=1e-3, warmup_steps=3, decay_steps=72),
                steps=36,
                checkpoint_every_steps=18,
            ),
        ),
        evaluation=compared_scores(
            sample.scores(max_length=64), instructions=EVALUATION_INSTRUCTIONS
        ),
        placement=on_a_laptop(),
    )


def quickstart_last_token() -> Run:
    """The quickstart's LLM alone with last-token pooling, trained the same way."""
    return last_token(quickstart(), "causal2vec-quickstart-last-token")


def quickstart_icl() -> Run:
    """The quickstart with short in-context examples before queries; takes about twice as long."""
    limits = ExamplesConfig(max_examples=2, query_tokens=24, response_tokens=32, max_tokens=160)
    return with_examples(
        quickstart(), "causal2vec-quickstart-icl", limits, EXAMPLES, query_max_length=224
    )


def last_token(run: Run, name: str) -> Run:
    """The run with the LLM alone and last-token pooling (Tables 2, 3 and 6).

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
    """The run with in-context examples: sampled in training, a fixed set for each task in
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
                f"examples for {task!r}, which has no instruction; set "
                f"evaluation.instructions.{task}, or leave them out"
            )
        template = model.instruction_template
        instructions[task] = instruction_with_examples(template, instructions[task], pairs)
    evaluation = changed(run.evaluation, instructions=instructions)
    return changed(run, name=name, model=model, evaluation=evaluation)


def _causal2vec(run: Run) -> Causal2VecConfig:
    if not isinstance(run.model, Causal2VecConfig):
        raise ConfigError(f"{run.name!r} is a run of {run.model.kind!r}, not of 'causal2vec'")
    return run.model
