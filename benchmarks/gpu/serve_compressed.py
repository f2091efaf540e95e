"""Quantised folders on a GPU: vectors and documents a second by vLLM, beside the model as it was.

A model is quantised to int8 and FP8 (GPTQ's files have the form of int8's), then embeds the same
texts as it was and quantised, by rayembed, whose layers then round in float and gain no time, and
by vLLM, which multiplies in 8 bits where the GPU has units for it. First vectors are compared: of a
quantised model with those of the model as it was, and vLLM's with rayembed's of the same folder.
vLLM's side has been written but not executed: no GPU was at hand.
Run: python -m benchmarks.gpu.serve_compressed [--toy] [--shape bert 7b]
     python -m benchmarks.gpu.serve_compressed --model FOLDER --compressed FOLDER [FOLDER …]
"""

import gc
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from benchmarks.gpu import made_up
from benchmarks.gpu.encoding import Encode, ours, vllm
from benchmarks.gpu.measuring import (
    arguments,
    check,
    device_of,
    machine_line,
    print_table,
    wall_seconds,
)

_WAYS = ("int8", "fp8")
_LEAST = {"rayembed": 0.98, "vLLM": 0.99}
"""Cosine to the model as it was, and of vLLM to rayembed with the same folder."""


def shapes(toy: bool) -> dict[str, dict]:
    """Shapes by the names on the command line."""
    if toy:
        return {"bert": made_up.TOY_ENCODER, "7b": made_up.TOY_DECODER}
    return {
        "bert": made_up.published_shape(made_up.BERT_BASE),
        "7b": made_up.published_shape(made_up.MISTRAL_7B),
    }


def folders_of_shape(home: Path, shape: dict, device: torch.device, dtype: str) -> dict[str, Path]:
    """Folder of a model with random weights as it was, and of each quantised one, by label."""
    from rayembed.models.loading.load import load_model
    from rayembed_extras.compression.contract import CompressionSource
    from rayembed_extras.compression.settings import COMPRESSIONS

    load_model(made_up.model_folder(home / "made", shape, device, dtype)).save(home / "as it was")
    gc.collect()
    found = {"as it was": home / "as it was"}
    for kind in _WAYS:
        COMPRESSIONS.classes()[kind]().compress(CompressionSource(home / "as it was"), home / kind)
        found[kind] = home / kind
    return found


def labelled(model: Path, compressed: Sequence[Path]) -> dict[str, Path]:
    """Folders that the command names, by the kinds that `compression.json` states."""
    found = {"as it was": model}
    for folder in compressed:
        stated = json.loads((folder / "compression.json").read_text())
        found[f"{stated['settings']['kind']} ({folder.name})"] = folder
    return found


def sides(folder: Path, device: torch.device, dtype: str) -> Iterator[tuple[str, Encode]]:
    """Name of a side, and what embeds documents there."""
    yield "rayembed", ours(folder, device, dtype)
    if device.type == "cuda" and importlib.util.find_spec("vllm"):
        yield "vLLM", vllm(folder, dtype)


def megabytes(folder: Path) -> str:
    """Weights on disk."""
    return f"{sum(path.stat().st_size for path in folder.rglob('*.safetensors')) / 1e6:,.1f}"


def rows_of(
    name: str,
    folders: dict[str, Path],
    texts: list[str],
    device: torch.device,
    dtype: str,
    rounds: int,
) -> list[list[object]]:
    """Rows of one model."""
    rows: list[list[object]] = []
    original: np.ndarray | None = None
    for label, folder in folders.items():
        same: np.ndarray | None = None
        for side, encode in sides(folder, device, dtype):
            found = encode(texts[:64])
            same = found if same is None else same
            original = found if original is None else original
            of_model = float((found * original).sum(axis=1).mean())
            if side == "vLLM":
                least = float((found * same).sum(axis=1).min())
                what = f"{name}, {label}: vLLM's vectors, cosine to rayembed's at least {least:.4f}"
            else:
                least = float((found * original).sum(axis=1).min())
                what = f"{name}, {label}: cosine to the model as it was at least {least:.4f}"
            check(least > _LEAST[side], what)
            taken = wall_seconds(
                lambda encode=encode: encode(texts), device, warmup=1, rounds=rounds
            )
            rows.append(
                [
                    f"{name}, {label}",
                    side,
                    megabytes(folder),
                    f"{len(texts) / taken:,.0f}",
                    f"{of_model:.4f}",
                ]
            )
            del encode
            gc.collect()
    return rows


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", nargs="+", choices=["bert", "7b"], default=["bert", "7b"])
    parser.add_argument("--model", type=Path, help="a model's folder, in place of made-up ones")
    parser.add_argument("--compressed", type=Path, nargs="+", default=[], help="quantised folders")
    parser.add_argument("--texts", type=int, default=None)
    parser.add_argument("--folder", type=Path, help="where models are written (7B: 30 GB)")
    options = parser.parse_args(given)
    if bool(options.model) != bool(options.compressed):
        parser.error("--model and --compressed are given together")
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    print(machine_line(device))
    number = options.texts or (80 if options.toy else 5000)
    rounds = options.rounds or 2
    rows: list[list[object]] = []
    if options.model:
        folders = labelled(options.model, options.compressed)
        texts = made_up.documents(number, 30_000, longest=256)
        rows += rows_of(options.model.name, folders, texts, device, dtype, rounds)
    else:
        for key in options.shape:
            shape = shapes(options.toy)[key]
            longest = 40 if options.toy else 512
            texts = made_up.documents(number, int(shape["vocab_size"]), longest=longest)
            with tempfile.TemporaryDirectory(dir=options.folder) as home:
                folders = folders_of_shape(Path(home), shape, device, dtype)
                rows += rows_of(key, folders, texts, device, dtype, rounds)
    print()
    heads = ["model", "side", "MB of weights", "documents/s", "mean cosine to the model as it was"]
    print_table(heads, rows)


if __name__ == "__main__":
    main()
