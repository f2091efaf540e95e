"""Small bi-encoders with every part that a server can lose: prompts, head, EOS, a long limit."""

from pathlib import Path

import torch
import transformers
from tiny_folders import GIVEN, tiny_settings
from tiny_models import byte_level_tokenizer, decoder_config, made_once, wordpiece_tokenizer
from tokenizers import processors

from rayembed.models.loading.build import build_model

LENGTH = 320
"""Maximum tokens: above 256, where a usual mistake cuts."""


def _spread(model):
    """Weights large enough that each token, position and layer counts."""
    for name, value in model.named_parameters():
        if value.ndim > 1:
            torch.nn.init.normal_(value, std=1.0 if "embed" in name else value.shape[1] ** -0.5)


def _encoder(folder, length):
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=length + 8,
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    _spread(model)
    model.save_pretrained(folder)
    wordpiece_tokenizer().save_pretrained(folder)


def _decoder(folder, length):
    model = transformers.AutoModel.from_config(
        decoder_config("qwen3", max_position_embeddings=length + 8, vocab_size=330)
    )
    _spread(model)
    model.save_pretrained(folder)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>", "pad_token": "<|end|>"})
    backend = tokenizer.backend_tokenizer
    special = [(name, backend.token_to_id(name)) for name in ("<|begin|>", "<|end|>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>",
        pair="<|begin|> $A <|end|> $B <|end|>",
        special_tokens=special,
    )
    tokenizer.save_pretrained(folder)


KINDS = {
    "mean": (_encoder, {"pooling": {"kind": "mean"}, "projections": [{"width": 24}]}),
    "cls": (_encoder, {"pooling": {"kind": "cls"}}),
    "last": (_decoder, {"pooling": {"kind": "eos"}}),
}
"""Pooling → what saves the backbone, and the settings of the model."""


@made_once
def save_proved(folder: Path, kind: str, length: int = LENGTH) -> Path:
    """A model in plain sentence-transformers format, with its proof."""
    from rayembed.proof.write import write_proof

    save, settings = KINDS[kind]
    place = folder.with_name(f"{folder.name}-parts")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        save(place, length)
    lengths = {"query_max_length": length, "document_max_length": length}
    config = tiny_settings("biencoder", **{"backbone": GIVEN, **lengths, **settings})
    build_model(config, {"backbone": place}, seed=3).eval().save(folder)
    write_proof(folder)
    return folder
