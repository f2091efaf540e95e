"""Runs of Causal2Vec (arXiv 2507.23386): the published ones and one for a laptop.

The ablations are settings of any of them: `model.num_contextual_tokens` (Table 5),
`model.position` (14), `model.representation` (2, 4, 12), `model.mask` (15), `model.encoder.path`
(6), `model.encoder.frozen` with `model.encoder.lora` (10), `model.backbone.path` (11). Plain
last-token pooling (Tables 2, 3 and 6) is `model.encoder=null` with `model.representation=eos`.
"""

from collections.abc import Mapping, Sequence

from rayembed.config.backbone import BackboneConfig, LoraConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.instructions import instruction_with_examples
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.errors import ConfigError
from rayembed.losses.infonce import InfoNCE
from rayembed.models.causal2vec.config import Causal2VecConfig, EncoderConfig, ExamplesConfig
from rayembed.optim.adamw import AdamW
from rayembed.recipes.building_blocks import (
    EVALUATION_INSTRUCTIONS,
    PUBLISHED_SCORES,
    compared_scores,
    on_a_laptop,
    on_gpus,
)
from rayembed.recipes.datasets.causal2vec import entries
from rayembed.samples.assets import DESCRIPTION_TASK, MINILM, SENTENCE_TASK, SMOLLM2
from rayembed.samples.wikipedia import Wikipedia

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

E5_BASE = "hf://intfloat/e5-base-v2@main"


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


def mistral_7b() -> Run:
    """Causal2Vec-Mistral-7B (Tables 1 and 7): the encoder frozen."""
    return published(
        "causal2vec-mistral-7b",
        "hf://mistralai/Mistral-7B-Instruct-v0.2@main",
        large=True,
        prompt=_INSTRUCT,
    )


def mistral_7b_icl() -> Run:
    """Causal2Vec-Mistral-7B with in-context learning (Table 1, last row).

    "The same ICL strategy" as bge-en-icl (section 4.3): up to five examples in 2,048 tokens. There
    queries end in a mark for the response, which the paper's template does not have, nor this one.
    It is scored with the examples of bge-en-icl's repository, which are not copied here:
    `with_examples` puts in yours.
    """
    return with_examples(
        mistral_7b(), "causal2vec-mistral-7b-icl", ExamplesConfig(), {}, query_max_length=2048
    )


def llama2_7b() -> Run:
    """Causal2Vec-LLaMA-2-7B (Tables 1 and 7): the encoder frozen."""
    return published(
        "causal2vec-llama2-7b",
        "hf://meta-llama/Llama-2-7b-chat-hf@main",
        large=True,
        prompt=_INSTRUCT,
    )


def qwen2_5_1_5b() -> Run:
    """Causal2Vec-Qwen2.5-1.5B (Tables 1 and 7): adapters on the encoder too.

    The template's `<|im_end|>` is the tokenizer's own EOS, which stands at the end anyway.
    """
    return published(
        "causal2vec-qwen2.5-1.5b",
        "hf://Qwen/Qwen2.5-1.5B-Instruct@main",
        large=False,
        prompt=("<|im_start|>user\n", ""),
    )


def sheared_llama_1_3b() -> Run:
    """Causal2Vec-S-LLaMA-1.3B (Tables 1 and 7); no template, as it is not instruction-tuned."""
    return published(
        "causal2vec-sllama-1.3b",
        "hf://princeton-nlp/Sheared-LLaMA-1.3B@main",
        large=False,
        prompt=("", ""),
    )


_INSTRUCT = ("[INST]", "[/INST]")
"""Begin and end of a user turn; the tokenizers of both models put a space before words themselves.
"""


def published(name: str, backbone: str, *, large: bool, prompt: tuple[str, str]) -> Run:
    """Published-size run (Appendix A) with its data.

    Steps, batches, optimiser, LoRA's rank and alpha are the paper's. It does not state LoRA's
    dropout and layers, weight decay and clipping, nor how many hard negatives a query has: they are
    those of LLM2Vec, whose code it follows, and the usual ones of transformers. Of the data sets'
    shares it tells the ratios of A.3: every record is drawn as often as any other.

    Args:
        large: of 7B, otherwise of 1.3B or 1.5B (the two columns of Table 7).
        prompt: begin and end of a user's turn in the chat template.
    """
    lora = LoraConfig(rank=64, alpha=32 if large else 128, dropout=0.05)
    on_encoder = lora.model_copy(update={"target_modules": ENCODER_LAYERS})
    steps = 1000 if large else 2000
    datasets = tuple(entry.config for entry in entries())
    return Run(
        name=name,
        seed=42,
        model=Causal2VecConfig(
            backbone=BackboneConfig(path=backbone, dtype="bfloat16"),
            encoder=EncoderConfig(path=E5_BASE, frozen=large, lora=None if large else on_encoder),
            lora=lora,
            prompt_start=prompt[0],
            prompt_end=prompt[1],
            query_max_length=512,
            document_max_length=512,
        ),
        data=DataConfig(datasets=datasets),
        stages=(
            StageConfig(
                name="retrieval",
                datasets={dataset.name: 1.0 for dataset in datasets},
                batch=BatchConfig(
                    policy="homogeneous",
                    temperature=1.0,
                    global_pairs=512,
                    num_negatives=1,
                    in_batch_negatives=True,
                ),
                loss=InfoNCE(temperature=0.05),
                optimizer=AdamW(learning_rate=1e-4, warmup_steps=300, decay_steps=2 * steps),
                steps=steps,
                checkpoint_every_steps=250,
            ),
        ),
        evaluation=EvaluationConfig(benchmarks=PUBLISHED_SCORES),
        placement=on_gpus(micro_batch_tokens=16_384),
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
