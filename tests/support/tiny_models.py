"""Tiny random models of several families, with tokenizers trained on a few lines, in folders."""

import torch
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [
    "Instruct: Given a question, retrieve passages that answer it\nQuery: ",
    "are cats larger than dogs and where do they live",
    "the quick brown fox jumps over the lazy dog",
    "7 wonders of the ancient world",
    "Paris is the capital of France",
]

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DECODERS = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 4}),
    "qwen2": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 8}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 8, "sliding_window": 4}),
    "gemma3_text": (transformers.Gemma3TextConfig, {"head_dim": 8, "sliding_window": 4}),
}


def metaspace_tokenizer(add_bos=False):
    """A SentencePiece-like tokenizer: `▁` before words, BOS and EOS, BOS added if asked."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        LINES * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=special)
    )
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_level_tokenizer():
    """A GPT-2-like tokenizer whose only special token is EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def wordpiece_tokenizer():
    """A BERT-like tokenizer: lower case, [CLS] and [SEP] around the text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        LINES * 3, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def decoder_config(family, **changes):
    """The configuration of a tiny decoder of the family."""
    config_class, own = DECODERS[family]
    settings = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "attention_dropout": 0}
    return config_class(**(SIZES | settings | own | changes))


def save_decoder(folder, family="llama", *, seed=0, tokenizer=None, **changes):
    """A tiny decoder with random weights and a tokenizer in a folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModel.from_config(decoder_config(family, **changes))
        _spread(model)
    model.save_pretrained(folder)
    (tokenizer or metaspace_tokenizer()).save_pretrained(folder)
    return folder


def save_encoder(folder, *, seed=0):
    """A tiny BERT with random weights and a tokenizer in a folder."""
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.BertModel(config)
        _spread(model)
    model.save_pretrained(folder)
    wordpiece_tokenizer().save_pretrained(folder)
    return folder


def save_cross_encoder(folder, *, num_labels=1, seed=0):
    """A tiny BERT that scores pairs, with random weights and a tokenizer, in a folder."""
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=num_labels,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config)
        _spread(model)
    model.save_pretrained(folder)
    wordpiece_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def _spread(model):
    """Larger weights than the initial 0.02, so that attention and norms matter to the result."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.15)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
