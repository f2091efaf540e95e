"""Encoding on one GPU: rayembed beside sentence-transformers, and vLLM where it is installed.

The same texts and weights in bfloat16, for a small encoder, one of BERT's base size and a
bi-encoder of Mistral-7B's size. First each side's vectors are compared with those in float32. Text
Embeddings Inference is a server of its own: `serving.py --url` measures it.
Run: python -m benchmarks.gpu.encoding [--toy] [--models minilm bert 7b] [--folder DIR]
"""

import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.gpu import made_up
from benchmarks.gpu.measuring import (
    arguments,
    check,
    device_of,
    has_flash_attention,
    machine_line,
    peak_gb,
    print_table,
    product_flops,
    reset_peak,
    tokens_of,
    wall_seconds,
)

Encode = Callable[[list[str]], np.ndarray]
"""Unit vectors of documents, float32."""


def cases(toy: bool) -> dict[str, tuple[str, Mapping[str, Any], int]]:
    """Name, shape and number of texts by the names on the command line."""
    if toy:
        return {
            "minilm": ("toy encoder", made_up.TOY_ENCODER, 40),
            "bert": ("toy encoder again", made_up.TOY_ENCODER, 40),
            "7b": ("toy decoder", made_up.TOY_DECODER, 40),
        }
    return {
        "minilm": ("MiniLM (22M)", made_up.published_shape(made_up.MINILM), 50_000),
        "bert": ("BERT base (110M)", made_up.published_shape(made_up.BERT_BASE), 20_000),
        "7b": ("Mistral-7B", made_up.published_shape(made_up.MISTRAL_7B), 1_000),
    }


def ours(folder: Path, device: torch.device, dtype: str) -> Encode:
    from rayembed.models.encoding import encode
    from rayembed.models.load import load_model

    model = load_model(folder, dtype=dtype).to(device)
    return lambda texts: encode(model, texts, role="document")


def one_after_the_other(folder: Path, device: torch.device, dtype: str) -> Encode:
    """What is tokenised and collated ahead elsewhere is so between two passes here."""
    from rayembed.models import encoding, passes

    encode = ours(folder, device, dtype)

    def in_turns(work: Callable[[Any], Any], items: Any, read_ahead: int) -> Iterator[Any]:
        yield from map(work, items)

    def waiting(texts: list[str]) -> np.ndarray:
        with patch.object(encoding, "ahead", in_turns), patch.object(passes, "ahead", in_turns):
            return encode(texts)

    return waiting


def peer(folder: Path, device: torch.device, dtype: str, *, attention: str, batch: int) -> Encode:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(folder),
        device=str(device),
        model_kwargs={"attn_implementation": attention, "dtype": getattr(torch, dtype)},
    )
    return lambda texts: np.asarray(
        model.encode(texts, batch_size=batch, normalize_embeddings=True, show_progress_bar=False),
        dtype=np.float32,
    )


def vllm(folder: Path, dtype: str) -> Encode:
    from vllm import LLM

    model = LLM(model=str(folder), runner="pooling", dtype=dtype, enforce_eager=False)

    def encode(texts: list[str]) -> np.ndarray:
        found = np.array([one.outputs.embedding for one in model.embed(texts)], dtype=np.float32)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    return encode


def sides(
    folder: Path, device: torch.device, dtype: str, batch: int
) -> Iterator[tuple[str, Callable[[], Encode]]]:
    """Name, and what loads the model."""
    name = "sentence-transformers"
    yield "rayembed", lambda: ours(folder, device, dtype)
    yield "rayembed, without threads", lambda: one_after_the_other(folder, device, dtype)
    yield (
        f"{name}, SDPA",
        lambda: peer(folder, device, dtype, attention="sdpa", batch=batch),
    )
    if has_flash_attention():
        yield (
            f"{name}, flash-attn, unpadded",
            lambda: peer(folder, device, dtype, attention="flash_attention_2", batch=batch),
        )
    if device.type == "cuda" and importlib.util.find_spec("vllm"):
        yield "vLLM (its own pooling: vectors are not compared)", lambda: vllm(folder, dtype)


def rows_of(
    name: str, folder: Path, texts: list[str], device: torch.device, dtype: str, options: Any
) -> list[list[object]]:
    """Rows of one model."""
    from rayembed.models.biencoder.config import BiEncoderConfig
    from rayembed.pipeline.requirements import flops_per_token

    reference = peer(folder, device, "float32", attention="sdpa", batch=8)(texts[:32])
    gc.collect()
    tokens = tokens_of(folder, texts)
    a_token = flops_per_token(BiEncoderConfig(backbone={"path": str(folder)})) or 0.0
    peak = product_flops(device, getattr(torch, dtype), 256 if device.type == "cpu" else 8192)
    found = []
    for side, load in sides(folder, device, dtype, options.batch):
        reset_peak(device)
        try:
            encode = load()
            if "vLLM" not in side:
                least = float((encode(texts[:32]) * reference).sum(1).min())
                needed = 0.98 if dtype == "bfloat16" else 0.9999
                check(least > needed, f"{name}, {side}: cosine to float32 at least {least:.4f}")
            rounds = options.rounds or 2
            taken = wall_seconds(
                lambda encode=encode: encode(texts), device, warmup=1, rounds=rounds
            )
        except torch.cuda.OutOfMemoryError:
            found.append([name, side, "out of memory", "", "", ""])
        else:
            share = tokens * a_token / taken / peak
            numbers = [f"{len(texts) / taken:,.0f}", f"{tokens / taken:,.0f}", f"{share:.1%}"]
            found.append([name, side, *numbers, peak_gb(device)])
        encode = None
        gc.collect()
    return found


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*cases(True)], default=[*cases(True)])
    parser.add_argument("--batch", type=int, default=128, help="texts, of sentence-transformers")
    parser.add_argument("--folder", type=Path, help="where models are kept (7B: 15 GB)")
    options = parser.parse_args(given)
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    print(machine_line(device))
    rows = []
    with made_up.folder_of_models(options.folder) as folder:
        for key in options.models:
            name, shape, count = cases(options.toy)[key]
            longest = 40 if options.toy else 512
            texts = made_up.documents(count, int(shape["vocab_size"]), longest=longest)
            made = made_up.model_folder(folder / key, shape, device, dtype)
            gc.collect()
            rows += rows_of(name, made, texts, device, dtype, options)
    print()
    heads = ["model", "side", "texts/s", "tokens/s", "share of measured peak", "peak GB"]
    print_table(heads, rows)


if __name__ == "__main__":
    main()
