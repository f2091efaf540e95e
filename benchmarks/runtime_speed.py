"""How fast a CPU serves a model: torch, onnxruntime, OpenVINO; float32, bfloat16 and int8.

all-MiniLM-L6-v2 and Wikipedia's articles. Each side is made as `jobs/compress_model.py` makes it
and encodes the same documents by the same code; sentence-transformers in float32 is the peer. Sides
have their turns in each round, and of the rounds the best counts: documents per CPU-second with one
thread (what a busy machine changes least) and documents per second with all cores. The score is
nDCG@10 of sentences that look for the rest of their articles. bfloat16 is left out where the CPU
emulates it.

    python benchmarks/runtime_speed.py --documents 300 --rounds 3
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path


def has_bfloat16():
    from rayembed.machine.hardware import auto_precision

    return auto_precision("cpu").dtype == "bfloat16"


def ways():
    from rayembed_extras.compression.runtimes import Onnx, OpenVINO

    precisions = ("float32", "int8-dynamic", "int8-static")
    found = [Onnx(precision=one) for one in precisions]
    for bfloat16 in (False, True) if has_bfloat16() else (False,):
        found += [OpenVINO(precision=one, bfloat16=bfloat16) for one in precisions]
    return {way.label: way for way in found}


def parts(given):
    """Documents to encode, held-out pairs as a set, and texts to calibrate with."""
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia
    from rayembed_extras.compression.contract import CalibrationText

    lines = resolve(Wikipedia(held_out=0).pairs("sentence").path).read_text().splitlines()
    rows = [(row["query"], row["positive"]) for row in map(json.loads, lines)]
    random.Random(0).shuffle(rows)
    held_out, others = rows[: given.corpus], rows[given.corpus :]
    texts = [CalibrationText(text, "document") for _, text in others[: given.calibration]]
    return (
        [text for _, text in held_out[: given.documents]],
        texts,
        {
            "corpus": {f"d{i}": text for i, (_, text) in enumerate(held_out)},
            "queries": {f"q{i}": text for i, (text, _) in enumerate(held_out[: given.queries])},
            "qrels": {f"q{i}": {f"d{i}": 1} for i in range(given.queries)},
        },
    )


def sides(given, texts, output):
    """Folders by the names of sides; made once."""
    from rayembed.assets.resolver import resolve_model
    from rayembed.recipes.sample import MINILM
    from rayembed_extras.compression.contract import CompressionSource

    source = resolve_model(MINILM)
    found = {"torch float32": source, "sentence-transformers": source}
    if has_bfloat16():
        found["torch bfloat16"] = source
    for label, way in ways().items():
        if given.sides and label not in given.sides:
            continue
        found[label] = Path(output) / label
        if not found[label].exists():
            began = time.process_time()
            way.compress(CompressionSource(source, texts), found[label])
            print(f"{label}: made in {time.process_time() - began:.0f} CPU-s", flush=True)
    return found


def encoder(name, folder, length):
    """Function that encodes documents."""
    if name == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        theirs = SentenceTransformer(str(folder), device="cpu")
        theirs.max_seq_length = length
        return lambda documents: theirs.encode(documents, show_progress_bar=False)
    from rayembed.models.loading.load import load_model
    from rayembed.models.passes.encoding import encode

    dtype = name.removeprefix("torch ") if name.startswith("torch ") else None
    model = load_model(folder, dtype=dtype)
    model.tokenizer.max_lengths = {"query": length, "document": length}
    return lambda documents: encode(model, documents, role="document")


def measured(encoders, documents, rounds, threads):
    """Best documents per CPU-second and per second of each side."""
    import torch

    torch.set_num_threads(threads)
    best = dict.fromkeys(encoders, (0.0, 0.0))
    vectors = {}
    for number in range(rounds + 1):
        for name, encode in encoders.items():
            given = documents if number else documents[:8]  # first calls open and compile
            cpu, wall = time.process_time(), time.perf_counter()
            vectors[name] = encode(given)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if number:
                made = len(given) / cpu, len(given) / wall
                best[name] = tuple(map(max, best[name], made))
    return best, vectors


def score(name, folder, held_out, given, output):
    import rayembed

    dtype = name.removeprefix("torch ") if name.startswith("torch ") else "float32"
    settings = {
        "model.dtype": dtype,
        "model.max_length": given.length,
        "placement.threads_per_worker": given.threads,
    }
    (found,) = rayembed.evaluate(folder, held_out, output=output, settings=settings).values()
    return found


def main():
    from rayembed.machine.cores import num_cores

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--corpus", type=int, default=1000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--calibration", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--sides", nargs="*", default=[], help="labels such as onnx-int8-static")
    parser.add_argument("--no-score", action="store_true")
    parser.add_argument("--output", help="folder in which the graphs stay; default: none do")
    given = parser.parse_args()
    from rayembed.registry.provenance import cpu_summary

    documents, texts, held_out = parts(given)
    with tempfile.TemporaryDirectory() as scratch:
        folders = sides(given, texts, given.output or scratch)
        encoders = {name: encoder(name, at, given.length) for name, at in folders.items()}
        alone, vectors = measured(encoders, documents, given.rounds, 1)
        together = alone
        if given.threads > 1:
            together, _ = measured(encoders, documents, given.rounds, given.threads)
        print(f"{cpu_summary()}, {len(documents)} documents\n")
        print(
            "| side | documents / CPU-s, 1 thread | documents / s, all cores | MB | cosine | "
            "nDCG@10 |"
        )
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for name, folder in folders.items():
            found = "–"
            if not given.no_score and name != "sentence-transformers":
                found = f"{score(name, folder, held_out, given, scratch):.4f}"
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
            cosine = (vectors[name] * vectors["torch float32"]).sum(axis=1).mean()
            ratio = alone[name][0] / alone["torch float32"][0]
            print(
                f"| {name} | {alone[name][0]:.1f} ({ratio:.2f}×) | {together[name][1]:.1f} | "
                f"{size:.0f} | {cosine:.4f} | {found} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
