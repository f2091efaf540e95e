"""Encoding on one GPU: rayembed beside sentence-transformers, and vLLM where it is installed.

The same texts and weights in bfloat16, for a small encoder, one of BERT's base size and a
bi-encoder of Mistral-7B's size. First each side's vectors are compared with those in float32, or of
models that `--check` leaves out with those of the side that ran first. Text Embeddings Inference is
a server of its own: `serving.py --url` measures it.
Run: python -m benchmarks.gpu.encoding [--toy] [--models minilm bert 7b] [--sides auto threads]
     [--check minilm bert] [--folder DIR]
"""

import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.gpu import made_up, peers, predictions
from benchmarks.gpu.measuring import (
    Table,
    arguments,
    compare,
    device_of,
    gpu_name,
    machine_line,
    mixed,
    peak_gb,
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
    from rayembed.models.loading.load import load_model
    from rayembed.models.passes.encoding import encode

    model = load_model(folder, dtype=dtype).to(device)
    return lambda texts: encode(model, texts, role="document")


def one_after_the_other(folder: Path, device: torch.device, dtype: str) -> Encode:
    """What is tokenised and collated ahead elsewhere is so between two passes here."""
    from rayembed.models.passes import encoding, passes

    encode = ours(folder, device, dtype)

    def in_turns(work: Callable[[Any], Any], items: Any, read_ahead: int) -> Iterator[Any]:
        yield from map(work, items)

    def waiting(texts: list[str]) -> np.ndarray:
        with patch.object(encoding, "ahead", in_turns), patch.object(passes, "ahead", in_turns):
            return encode(texts)

    return waiting


def peer(folder: Path, device: torch.device, dtype: str, attention: str, batch: int) -> Encode:
    model = peers.loaded(folder, device, dtype, attention)
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


SIDES = {
    "auto": "rayembed",
    "in-turn": "rayembed, without threads",
    "peer": "sentence-transformers",
    "vllm": "vLLM (its own pooling: vectors are not compared)",
}
"""Names on the command line → what they are called in the table; `peer` is one side or two."""


def sides(
    folder: Path, device: torch.device, dtype: str, batch: int, chosen: Sequence[str]
) -> Iterator[tuple[str, Callable[[], Encode]]]:
    """Name in the table, and what loads the model."""
    if "auto" in chosen:
        yield SIDES["auto"], lambda: ours(folder, device, dtype)
    if "in-turn" in chosen:
        yield SIDES["in-turn"], lambda: one_after_the_other(folder, device, dtype)
    if "peer" in chosen:
        for name, attention in peers.attentions():
            yield name, partial(peer, folder, device, dtype, attention, batch)
    if "vllm" in chosen and device.type == "cuda" and importlib.util.find_spec("vllm"):
        yield SIDES["vllm"], lambda: vllm(folder, dtype)


def measure(
    key: str, folder: Path, device: torch.device, dtype: str, table: Table, options: Any
) -> None:
    """Add the rows of one model to the table, each after a check of its vectors."""
    from rayembed.models.biencoder.config import BiEncoderConfig

    name, shape, count = cases(options.toy)[key]
    longest = 40 if options.toy else 512
    texts = made_up.documents(count, int(shape["vocab_size"]), longest=longest)
    exact = options.check is None or key in options.check
    kept = folder / f"encoded-{exact}.npy"
    if exact and not kept.exists():
        np.save(kept, peer(folder, device, "float32", "sdpa", 8)(texts[:32]))
        gc.collect()
    tokens = tokens_of(folder, texts)
    settings = BiEncoderConfig(backbone={"path": str(folder), "dtype": "bfloat16"})
    gpu = predictions.gpu_of(gpu_name(device))
    model = predictions.Model(settings, predictions.MACHINES[gpu], folder)
    peak = product_flops(device, getattr(torch, dtype), 256 if device.type == "cpu" else 8192)
    lengths = [len(text.split()) + 2 for text in texts]
    for side, load in sides(folder, device, dtype, options.batch, options.sides):
        own = side == SIDES["auto"]
        expected = model.encoding(lengths, peak=peak).cells() if own else predictions.UNKNOWN
        reset_peak(device)
        try:
            encode = load()
            if side != SIDES["vllm"]:
                least = 0.98 if dtype == "bfloat16" else 0.9999
                compare(f"{name}, {side}", encode(texts[:32]), kept, least, exact=exact)
            rounds = options.rounds or 2
            taken = wall_seconds(
                lambda encode=encode: encode(texts), device, warmup=1, rounds=rounds
            )
            share = tokens * model.forward_flops() / taken / peak
            numbers = [f"{tokens / taken:,.0f}", f"{share:.1%}", peak_gb(device)]
            table.add([name, side, f"{len(texts) / taken:,.0f}", *mixed(numbers, expected)])
        except torch.cuda.OutOfMemoryError:
            table.add([name, side, "out of memory", *mixed(["", "", ""], expected)])
        print("measured:", *table.rows[-1], flush=True)
        encode = None
        gc.collect()


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*cases(True)], default=[*cases(True)])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument(
        "--check",
        nargs="*",
        choices=[*cases(True)],
        help="models that are compared with float32; default: all. Others are compared with the "
        "side that ran first, in this folder",
    )
    parser.add_argument("--batch", type=int, default=128, help="texts, of sentence-transformers")
    parser.add_argument("--folder", type=Path, help="where models are kept (7B: 15 GB)")
    options = parser.parse_args(given)
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    print(machine_line(device))
    heads = ["model", "side", "texts/s", "tokens/s"]
    heads += [f"predicted, {predictions.gpu_of(gpu_name(device))}"]
    heads += ["share of measured peak", "predicted", "peak GB", "predicted"]
    table = Table(f"Encoding. {machine_line(device)}.", heads, options.record)
    with made_up.folder_of_models(options.folder) as folder:
        for key in options.models:
            shape = cases(options.toy)[key][1]
            made = made_up.model_folder(folder / key, shape, device, dtype)
            gc.collect()
            measure(key, made, device, dtype, table, options)
    table.print()


if __name__ == "__main__":
    main()
