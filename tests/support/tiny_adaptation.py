"""A made-up corpus of three languages and an adaptation of a tiny XLM-R or BERT on it."""

import json
import random
from pathlib import Path

import torch
import transformers
from tiny_models import LINES, wordpiece_tokenizer

from rayembed.config.settings import parse
from rayembed_extras.adaptation.settings import Adaptation

ROWS = {"en": 240, "fr": 60, "sw": 24}
"""Texts of each language."""

SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FAMILIES = {
    "bert": (transformers.BertConfig, transformers.BertForMaskedLM, {}),
    "xlm-roberta": (
        transformers.XLMRobertaConfig,
        transformers.XLMRobertaForMaskedLM,
        {"type_vocab_size": 1, "pad_token_id": 0, "layer_norm_eps": 1e-5},
    ),
}


def masked_model(family: str, seed: int = 0):
    """A tiny masked-language model of transformers with random weights, spread and biased."""
    config_class, model_class, own = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**SIZES | own))
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.15
    model.tie_weights()
    return model.eval()


def save_masked(folder: Path, family: str = "bert", seed: int = 0) -> Path:
    """Such a model with its head and a tokenizer in a folder."""
    masked_model(family, seed).save_pretrained(folder)
    wordpiece_tokenizer().save_pretrained(folder)
    return folder


def write_corpus(folder: Path) -> Path:
    """Two JSONL files with `text` and `language`; two rows of 326 cannot be used."""
    words = " ".join(LINES).lower().split()
    numbers = random.Random(7)
    rows = [
        {"text": " ".join(numbers.choices(words, k=numbers.randint(3, 40))), "language": language}
        for language, count in ROWS.items()
        for _ in range(count)
    ]
    rows += [{"text": "  ", "language": "en"}, {"text": "no code", "language": None}]
    numbers.shuffle(rows)
    (folder / "texts").mkdir(parents=True)
    for number, some in enumerate((rows[:200], rows[200:])):
        lines = "".join(json.dumps(row) + "\n" for row in some)
        (folder / "texts" / f"{number}.jsonl").write_text(lines)
    return folder / "texts"


def tiny_adaptation(folder: Path, **changes) -> Adaptation:
    """Four steps of 12 sequences on the corpus of `write_corpus` in the folder."""
    return parse(
        Adaptation,
        {
            "name": "tiny-adaptation",
            "seed": 5,
            "model": {"backbone": {"path": str(folder / "bert"), "dtype": "float32"}},
            "corpus": {
                "root": str(folder),
                "texts": [
                    {
                        "name": "made-up",
                        "source": {
                            "kind": "texts",
                            "path": "texts",
                            "language": "language",
                            "max_rejected_share": 0.01,
                        },
                    }
                ],
                "max_length": 32,
            },
            "training": {
                "global_sequences": 12,
                "optimizer": {"learning_rate": 0.01, "warmup_steps": 1, "eps": 1e-4},
                "steps": 4,
                "checkpoint_every_steps": 2,
                "held_out": {"batches": 2, "every_steps": 2, "masking": {"probability": 0.4}},
            },
            "placement": {"storage_path": str(folder / "outputs"), "micro_batch_tokens": 100},
        }
        | changes,
    )
