"""Models with random weights and texts of random words, so that no benchmark needs a download.

Speed depends on shapes and lengths. A word is a token, so lengths are those that were drawn; an
encoder's words go through BERT's own steps (normalising, splitting, word pieces).
Run, to have the models before anything is timed:
     python -m benchmarks.gpu.made_up --folder DIR [--toy] [--models minilm bert 7b]
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.lengths import ONLY_RETRIEVAL, rows_of_lengths
from benchmarks.gpu.measuring import device_of

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")

MISTRAL_7B = "hf://mistralai/Mistral-7B-v0.1"
BERT_BASE = "hf://intfloat/e5-base-v2"
MINILM = "hf://sentence-transformers/all-MiniLM-L6-v2"

_SPREAD = 20.0
"""By which words' vectors are longer than a new model's."""

TOY_DECODER: Mapping[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOY_ENCODER: Mapping[str, Any] = {
    "model_type": "bert",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


MODELS = {"minilm": MINILM, "bert": BERT_BASE, "7b": MISTRAL_7B}
"""Published models by their names on command lines."""


def shape_of(key: str, toy: bool) -> Mapping[str, Any]:
    """Configuration of a model by its name on command lines."""
    if toy:
        return TOY_DECODER if key == "7b" else TOY_ENCODER
    return published_shape(MODELS[key])


def published_shape(reference: str) -> Mapping[str, Any]:
    """Configuration of a published model, as rayembed knows it without the hub."""
    from rayembed_extras.estimates.published_shapes import PUBLISHED

    return PUBLISHED[reference]


@contextmanager
def folder_of_models(kept: Path | None) -> Iterator[Path]:
    """Folder for models: a temporary one, or this one, whose models are used again."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def model_folder(
    folder: Path, shape: Mapping[str, Any], device: torch.device, dtype: str, seed: int = 0
) -> Path:
    """A transformers folder of this shape with random weights, made on the device; one that is
    there stays.
    """
    import transformers

    if (folder / "config.json").exists():
        return folder

    family = {key: value for key, value in shape.items() if key != "model_type"}
    if shape["model_type"] == "bert":  # on both sides, or one would draw numbers that are no work
        family |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.AutoConfig.for_model(shape["model_type"], **family)
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.AutoModel.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():  # else all texts would be alike: what layers add has no word in it
        model.get_input_embeddings().weight.mul_(_SPREAD)
    model.save_pretrained(folder)
    _tokenizer(int(shape["vocab_size"]), shape["model_type"]).save_pretrained(folder)
    return folder


def pairs(count: int, vocabulary: int, *, longest: int = 512, seed: int = 0) -> list[list[str]]:
    """Pairs of query and document with the lengths of retrieval data, at most `longest` tokens.

    A document begins with half of its query's words, so that what shares words belongs together.
    """
    lengths = np.minimum(rows_of_lengths(ONLY_RETRIEVAL, count, seed)[:, :2], longest)
    draw = np.random.default_rng(seed + 1)
    made = []
    for query, document in (lengths - 2).clip(2).tolist():
        words = draw.integers(0, vocabulary - len(SPECIAL), query)
        more = draw.integers(0, vocabulary - len(SPECIAL), document)
        shared = min(query, document) // 2 + 1
        more[:shared] = words[:shared]
        made.append([_text(words), _text(more)])
    return made


def documents(count: int, vocabulary: int, *, longest: int = 512, seed: int = 0) -> list[str]:
    """Documents of such pairs."""
    return [document for _, document in pairs(count, vocabulary, longest=longest, seed=seed)]


def _text(words: Sequence[int]) -> str:
    return " ".join(f"w{word}" for word in words)


def _tokenizer(vocabulary: int, family: str) -> Any:
    """A word is a token; texts end with EOS, and encoders' begin with BOS too."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = [*SPECIAL, *(f"w{number}" for number in range(vocabulary - len(SPECIAL)))]
    numbers = {word: number for number, word in enumerate(words)}
    if family == "bert":
        tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", 2), ("</s>", 3)],
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if family == "bert":
        names |= {"cls_token": "<s>", "sep_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512, **names
    )


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--toy", action="store_true", help="tiny ones, on the CPU")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--folder", type=Path, required=True, help="where models are kept (16 GB)")
    options = parser.parse_args(given)
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    for key in options.models:
        began = time.perf_counter()
        folder = model_folder(options.folder / key, shape_of(key, options.toy), device, dtype)
        size = sum(path.stat().st_size for path in folder.iterdir())
        taken = time.perf_counter() - began
        print(f"made: {folder}, {size / 1e9:.2f} GB, {taken:.1f} s", flush=True)


if __name__ == "__main__":
    main()
