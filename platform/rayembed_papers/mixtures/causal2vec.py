"""Runs of Causal2Vec at published size (arXiv 2507.23386)."""

from rayembed.config.backbone import BackboneConfig, LoraConfig
from rayembed.config.data import DataConfig
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.losses.infonce import InfoNCE
from rayembed.models.causal2vec.config import Causal2VecConfig, EncoderConfig, ExamplesConfig
from rayembed.optim.adamw import AdamW
from rayembed.recipes.causal2vec import ENCODER_LAYERS
from rayembed_papers.ablations import with_examples
from rayembed_papers.mixtures.datasets.causal2vec import entries
from rayembed_papers.mixtures.published import PUBLISHED_SCORES, on_gpus

E5_BASE = "hf://intfloat/e5-base-v2@main"

_INSTRUCT = ("[INST]", "[/INST]")
"""Begin and end of a user turn; the tokenizers of both models put a space before words themselves.
"""


def mistral_7b() -> Run:
    """Causal2Vec-Mistral-7B (Tables 1 and 7), trained with a frozen encoder."""
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
    """Causal2Vec-LLaMA-2-7B (Tables 1 and 7), trained with a frozen encoder."""
    return published(
        "causal2vec-llama2-7b",
        "hf://meta-llama/Llama-2-7b-chat-hf@main",
        large=True,
        prompt=_INSTRUCT,
    )


def qwen2_5_1_5b() -> Run:
    """Causal2Vec-Qwen2.5-1.5B (Tables 1 and 7), with adapters on the encoder too.

    The template's `<|im_end|>` is the tokenizer's own EOS, which is at the end anyway.
    """
    return published(
        "causal2vec-qwen2.5-1.5b",
        "hf://Qwen/Qwen2.5-1.5B-Instruct@main",
        large=False,
        prompt=("<|im_start|>user\n", ""),
    )


def sheared_llama_1_3b() -> Run:
    """Causal2Vec-S-LLaMA-1.3B (Tables 1 and 7), without a chat template because it is not
    instruction-tuned.
    """
    return published(
        "causal2vec-sllama-1.3b",
        "hf://princeton-nlp/Sheared-LLaMA-1.3B@main",
        large=False,
        prompt=("", ""),
    )


def published(name: str, backbone: str, *, large: bool, prompt: tuple[str, str]) -> Run:
    """Build a run of published size (Appendix A) with its data.

    Steps, batches, optimiser, LoRA's rank and alpha are the paper's. It does not state LoRA's
    dropout and layers, weight decay and clipping, nor how many hard negatives a query has: they are
    those of LLM2Vec, whose code it follows, and the usual ones of transformers. Of the data sets'
    shares it states the ratios of A.3: every record is drawn as often as any other.

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
