"""Tiny random rerankers of several families, as transformers saves them, and pairs to score."""

import json
from pathlib import Path

import torch
import transformers
from tiny_models import made_once, wordpiece_tokenizer

SIZES = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "bert": (transformers.BertConfig, {"intermediate_size": 48, "max_position_embeddings": 64}),
    "xlm-roberta": (
        transformers.XLMRobertaConfig,
        {"intermediate_size": 48, "max_position_embeddings": 66, "pad_token_id": 0},
    ),
    "distilbert": (
        transformers.DistilBertConfig,
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {
            "intermediate_size": 48,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
    ),
    "modernbert": (
        transformers.ModernBertConfig,
        {
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "local_attention": 8,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "cls_token_id": 2,
            "sep_token_id": 3,
        },
    ),
}
QUERY = "are cats larger than dogs and where do they live"
PAIRS = [
    (QUERY, "Paris is the capital of France"),
    ("7 wonders", "the quick brown fox jumps over the lazy dog"),
    ("Paris", QUERY),
    (QUERY, " ".join(["the quick brown fox jumps over the lazy dog"] * 12)),  # is cut
    (" ".join(["where do cats and dogs live"] * 12), "Paris is the capital"),  # in the query
]


@made_once
def save_scorer(folder, family="bert", *, labels=1, seed=0):
    """A random classifier of the family, with its tokenizer, in a folder."""
    kind, own = FAMILIES[family]
    sizes = {} if family == "distilbert" else SIZES
    config = kind(**({"vocab_size": 200} | sizes | own), num_labels=labels)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():  # scores that differ from pair to pair
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer = wordpiece_tokenizer()
    tokenizer.model_max_length = 48
    tokenizer.save_pretrained(folder)
    if family == "bert":  # as BERT's own tokenizer has it
        path = Path(folder, "tokenizer_config.json")
        names = ["input_ids", "token_type_ids", "attention_mask"]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))
    return folder
