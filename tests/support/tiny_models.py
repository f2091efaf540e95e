"""Tiny random models of several families, with tokenizers trained on a few lines, in folders."""

import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import safetensors.torch
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


_templates = tempfile.TemporaryDirectory(prefix="rayembed-tiny-")


def made_once(save):
    """What `save(folder, …)` leaves in the folder, and beside it in `<folder>-parts`, is made once
    in a process and then copied.

    With arguments that are no numbers or names, as weights, it is made anew.
    """

    @functools.wraps(save)
    def copied(folder, *args, **named):
        try:
            key = json.dumps([save.__name__, args, named], sort_keys=True)
        except TypeError:
            return save(folder, *args, **named)
        template = Path(_templates.name, hashlib.sha256(key.encode()).hexdigest()[:16])
        if not template.exists():
            save(template, *args, **named)
        folder = Path(folder)
        for made in (template, template.with_name(f"{template.name}-parts")):
            if made.exists():
                place = folder.with_name(folder.name + made.name.removeprefix(template.name))
                # Copies have times of their own, as what is made has.
                shutil.copytree(made, place, copy_function=shutil.copyfile, dirs_exist_ok=True)
        return folder

    return copied


def metaspace_tokenizer(add_bos=False):
    """A SentencePiece-like tokenizer: `▁` before words, BOS and EOS, BOS added if asked."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    # Made-up texts differ by their numbers; unknown digits would make them the same tokens.
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=list("0123456789")
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def save_mistral_tokenizer(folder):
    """tokenizer.json and tokenizer_config.json laid out as those of nvidia/NV-Embed-v2.

    `▁` is put before a text and in place of spaces, nothing cuts it into words, unknown characters
    are bytes, and none but ASCII letters take the `▁` before them into their token.
    """
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"})
    merges = [("▁", letter) for letter in letters]
    for word in "".join(c if c.isalpha() else " " for line in LINES for c in line).split():
        marked = f"▁{word}"
        merges += [(marked[:end], marked[end]) for end in range(2, len(marked))]
    merges = [*dict.fromkeys(merges), ("▁", "▁")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", *letters, *"0123456789:,.?()ñ", *(left + right for left, right in merges)]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": True,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": None,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


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


_WORD_PIECES = Path(__file__).with_name("word_pieces.txt")
"""Learnt from `LINES` once: the trainer breaks ties by chance, so that each process had others."""


def wordpiece_tokenizer():
    """A BERT-like tokenizer: lower case, [CLS] and [SEP] around the text."""
    vocabulary = {piece: number for number, piece in enumerate(_WORD_PIECES.read_text().split())}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
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


@made_once
def save_decoder(folder, family="llama", *, seed=0, tokenizer=None, **changes):
    """A tiny decoder with random weights and a tokenizer in a folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModel.from_config(decoder_config(family, **changes))
        _spread(model)
    model.save_pretrained(folder)
    (tokenizer or metaspace_tokenizer()).save_pretrained(folder)
    return folder


@made_once
def save_encoder(folder, *, seed=0, hidden_size=32):
    """A tiny BERT with random weights and a tokenizer in a folder."""
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=hidden_size,
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


@made_once
def save_nomic_encoder(folder, *, seed=0, vocab_size=200):
    """A tiny NomicBERT with random weights and a tokenizer in a folder."""
    config = transformers.NomicBertConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    return _save(transformers.NomicBertModel, config, folder, seed)


@made_once
def save_modern_encoder(folder, *, seed=0):
    """A tiny ModernBERT with a window of four tokens to either side, and a tokenizer."""
    config = transformers.ModernBertConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        local_attention=8,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
    )
    return _save(transformers.ModernBertModel, config, folder, seed)


def save_cde_stages(folder, save=save_encoder):
    """Folders of two encoders with different weights and the same tokenizer."""
    stages = {
        "backbone": save(folder / "second", seed=0),
        "encoder": save(folder / "first", seed=1),
    }
    transformers.AutoTokenizer.from_pretrained(stages["backbone"]).save_pretrained(
        stages["encoder"]
    )
    return stages


def _save(model_class, config, folder, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        _spread(model)
    model.save_pretrained(folder)
    wordpiece_tokenizer().save_pretrained(folder)
    return folder


def nomic_settings(**changes):
    """config.json of a tiny NomicBert, with the keys of nomic-ai/nomic-embed-text-v2-moe's."""
    return {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "activation_function": "gelu",
        "causal": False,
        "expert_choice_router": False,
        "ffn_div": 1,
        "layer_norm_epsilon": 1e-5,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_every_n_layers": 2,
        "moe_normalize_expert_weights": False,
        "moe_top_k": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_inner": 48,
        "n_layer": 4,
        "n_positions": 128,
        "num_experts": 4,
        "num_shared_experts": 0,
        "pad_token_id": 0,
        "prenorm": False,
        "qkv_proj_bias": True,
        "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "router_aux_loss_coef": 0.1,
        "type_vocab_size": 1,
        "use_rms_norm": None,
        "vocab_size": 256,
    } | changes


def nomic_weights(settings, *, seed=0):
    """Random weights of such a model, by the names and in the shapes of the published one."""
    width, inner, experts = settings["n_embd"], settings["n_inner"], settings["num_experts"]
    shapes = {
        "embeddings.word_embeddings.weight": (settings["vocab_size"], width),
        "embeddings.token_type_embeddings.weight": (settings["type_vocab_size"], width),
        "emb_ln.weight": (width,),
        "emb_ln.bias": (width,),
    }
    for i in range(settings["n_layer"]):
        layer = f"encoder.layers.{i}"
        own = {
            "attn.Wqkv.weight": (3 * width, width),
            "attn.Wqkv.bias": (3 * width,),
            "attn.out_proj.weight": (width, width),
            "attn.out_proj.bias": (width,),
            "norm1.weight": (width,),
            "norm1.bias": (width,),
            "norm2.weight": (width,),
            "norm2.bias": (width,),
        }
        if settings["moe_every_n_layers"] and i % settings["moe_every_n_layers"] == 1:
            own |= {
                "mlp.router.layer.weight": (experts, width),
                "mlp.experts.mlp.w1": (experts * inner, width),
                "mlp.experts.mlp.w2": (experts * inner, width),
                "mlp.experts.bias": (width,),
            }
        else:
            own |= {
                "mlp.fc1.weight": (inner, width),
                "mlp.fc1.bias": (inner,),
                "mlp.fc2.weight": (width, inner),
                "mlp.fc2.bias": (width,),
            }
        shapes |= {f"{layer}.{name}": shape for name, shape in own.items()}
    g = torch.Generator().manual_seed(seed)
    found = {name: 0.2 * torch.randn(shape, generator=g) for name, shape in shapes.items()}
    for name in found:
        if "norm" in name or "emb_ln" in name:
            found[name] += 1.0 if name.endswith("weight") else 0.0
        if "router" in name:
            found[name] *= 2.0
    return found


@made_once
def save_nomic(folder, *, seed=0, weights=None, **changes):
    """A tiny NomicBert in the published layout, with a tokenizer, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = nomic_settings(**changes)
    made = nomic_weights(settings, seed=seed) if weights is None else weights
    safetensors.torch.save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    wordpiece_tokenizer().save_pretrained(folder)
    return folder


@made_once
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
