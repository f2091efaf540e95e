"""What pruning and quantisation take from all-MiniLM-L6-v2 before any training repairs it.

Wikipedia's pairs (one sentence → the rest of its article): articles are held out, whose rests are
the corpus and whose sentences the queries; calibration texts are other articles' pairs. Each way is
run and its folder loaded. Printed are nDCG@10, its share of the uncompressed model's, the mean
cosine of the documents' vectors to those of the uncompressed model, bytes of weights and seconds
that compressing took; then SparseGPT 2:4 again by numbers of calibration texts.

    python benchmarks/pruning.py --documents 1000 --calibration 256
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np


def held_out_and_calibration(given):
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia

    lines = resolve(Wikipedia(held_out=0).pairs("sentence").path).read_text().splitlines()
    rows = [(row["query"], row["positive"]) for row in map(json.loads, lines)]
    random.Random(0).shuffle(rows)
    return rows[: given.documents], rows[given.documents :]


def calibration_texts(rows, number):
    from rayembed_extras.compression.contract import CalibrationText

    texts = [
        CalibrationText(text, role)
        for pair in rows
        for text, role in zip(pair, ("query", "document"), strict=True)
    ]
    return texts[:number]


def vectors(folder, pairs):
    from rayembed.models.loading.load import load_model
    from rayembed.models.passes.encoding import encode

    model = load_model(folder)
    queries, documents = zip(*pairs, strict=True)
    return encode(model, queries, role="query"), encode(model, documents, role="document")


def ndcg(queries, documents):
    scores = queries @ documents.T
    ranks = (scores > scores.diagonal()[:, None]).sum(axis=1)
    return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def ways(structures, minimum):
    from rayembed_extras.compression.settings import COMPRESSIONS

    kinds = COMPRESSIONS.classes()
    texts = {"minimum_texts": minimum}
    for structure in structures:
        for kind in ("magnitude", "wanda", "sparsegpt"):
            more = {} if kind == "magnitude" else texts
            yield kinds[kind](structure=structure, **more)
    yield kinds["int8"]()
    yield kinds["gptq"](**texts)
    yield kinds["fp8"]()


def main(given):
    from rayembed.assets.resolver import resolve_model
    from rayembed.models.loading.load import load_model
    from rayembed.recipes.sample import MINILM
    from rayembed_extras.compression.contract import CompressionSource
    from rayembed_extras.compression.settings import COMPRESSIONS

    pairs, rest = held_out_and_calibration(given)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        load_model(resolve_model(MINILM), dtype="float32").save(home / "model")
        queries, documents = vectors(home / "model", pairs)
        whole = ndcg(queries, documents)

        def row(label, folder, seconds):
            found = vectors(folder, pairs)
            score, near = ndcg(*found), float((found[1] * documents).sum(axis=1).mean())
            size = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e6
            print(
                f"| {label} | {score:.4f} | {score / whole:.1%} | {near:.4f} | {size:.1f} "
                f"| {seconds:.0f} |",
                flush=True,
            )

        print("| variant | nDCG@10 | share | cosine to the model | MB | seconds |")
        print("|---|---:|---:|---:|---:|---:|")
        row("as it was", home / "model", 0)
        for way in ways(given.structures, min(128, given.calibration)):
            texts = calibration_texts(rest, given.calibration)
            began = time.perf_counter()
            way.compress(CompressionSource(home / "model", texts), home / way.label)
            row(way.label, home / way.label, time.perf_counter() - began)
        for number in given.counts:
            way = COMPRESSIONS.classes()["sparsegpt"](structure="2:4", minimum_texts=number)
            began = time.perf_counter()
            folder = home / f"texts-{number}"
            way.compress(CompressionSource(home / "model", calibration_texts(rest, number)), folder)
            row(f"{way.label}, {number} texts", folder, time.perf_counter() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--calibration", type=int, default=256, help="texts")
    parser.add_argument("--structures", nargs="+", default=["unstructured", "4:8", "2:4"])
    parser.add_argument("--counts", nargs="*", type=int, default=[8, 32, 128, 512])
    main(parser.parse_args())
