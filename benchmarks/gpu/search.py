"""Exact top-k: rayembed's search beside FAISS's flat index, on the GPU and on the CPU, in one run.

rayembed searches by rounded products first, where the device is fast at them, and without.

Random unit vectors in half precision, as they are stored. First all sides' ids are compared with
those of float64 products over part of the corpus.
Run: python -m benchmarks.gpu.search [--toy] [--documents 1000000] [--width 1024]
"""

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.gpu import predictions
from benchmarks.gpu.measuring import (
    Table,
    arguments,
    check,
    device_of,
    gpu_name,
    machine_line,
    peak_gb,
    reset_peak,
    wall_seconds,
)

Search = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""Ids (Q, k) of the best documents."""


def unit_vectors(count: int, width: int, seed: int) -> np.ndarray:
    """(count, width) float16."""
    made = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float16)


def sides(device: torch.device) -> dict[str, Search]:
    """Searches that this machine has."""
    from rayembed.search import tiles
    from rayembed.search.exact import top_k

    def ours_on(where: str) -> Search:
        return lambda queries, documents, k: top_k(queries, [documents], k, where)[1]

    def without_rounding(queries: np.ndarray, documents: np.ndarray, k: int) -> np.ndarray:
        with patch.object(tiles, "rounds_first", lambda device: False):
            return ours_on(str(device))(queries, documents, k)

    found = {"rayembed": ours_on(str(device)), "rayembed, float32 alone": without_rounding}
    if device.type == "cuda":
        found["rayembed, CPU"] = ours_on("cpu")
    try:
        import faiss
    except ImportError:
        print("FAISS is not installed")
        return found

    def flat(queries: np.ndarray, documents: np.ndarray, k: int) -> np.ndarray:
        inputs = (x.astype(np.float32) for x in (queries, documents))
        return faiss.knn(*inputs, k, metric=faiss.METRIC_INNER_PRODUCT)[1]

    found["FAISS, CPU"] = flat
    if device.type == "cuda" and hasattr(faiss, "StandardGpuResources"):
        resources = faiss.StandardGpuResources()

        def on_gpu(queries: np.ndarray, documents: np.ndarray, k: int) -> np.ndarray:
            return faiss.knn_gpu(
                resources, queries, documents, k, metric=faiss.METRIC_INNER_PRODUCT
            )[1]

        found["FAISS, GPU"] = on_gpu
    elif device.type == "cuda":
        print("this build of FAISS has no GPU side")
    return found


def exact(queries: np.ndarray, documents: np.ndarray, k: int) -> np.ndarray:
    """Ids by float64 products, ties by the lower id."""
    scores = queries.astype(np.float64) @ documents.astype(np.float64).T
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--queries", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--k", type=int, default=100)
    options = parser.parse_args(given)
    if options.toy:
        options.queries, options.documents, options.width, options.k = 100, 2000, 32, 10
    device = device_of(options.toy)
    print(machine_line(device))
    queries = unit_vectors(options.queries, options.width, 0)
    documents = unit_vectors(options.documents, options.width, 1)
    some, part = queries[:64], documents[:20_000]
    wanted = exact(some, part, options.k)
    gpu = predictions.gpu_of(gpu_name(device))
    sizes = f"{options.queries:,} queries, {options.documents:,} documents"
    table = Table(
        f"Exact top-k: {sizes} of {options.width} dimensions, k = {options.k}. "
        f"{machine_line(device)}.",
        ["side", "seconds", f"predicted, {gpu}", "queries/s", "TFLOP/s of products", "peak GB"],
        options.record,
    )
    for name, search in sides(device).items():
        same = float((np.sort(search(some, part, options.k)) == np.sort(wanted)).mean())
        # Two documents may be nearer to each other than products in float32 are to exact ones.
        check(same > 0.999, f"{name}: {same:.3%} of the ids are those of float64")
        reset_peak(device)
        rounds = options.rounds or (1 if "CPU" in name else 3)
        taken = wall_seconds(
            lambda search=search: search(queries, documents, options.k),
            device,
            warmup=0 if "CPU" in name else 1,
            rounds=rounds,
        )
        flops = 2 * options.queries * options.documents * options.width
        expected = "–"
        if name == "rayembed":
            wanted_seconds = predictions.search_seconds(
                options.queries,
                options.documents,
                options.width,
                documents.itemsize,
                predictions.MACHINES[gpu],
            )
            expected = f"{wanted_seconds:.2g}"
        speed = f"{options.queries / taken:,.0f}"
        work = f"{flops / taken / 1e12:.3g}"
        table.add([name, f"{taken:.3g}", expected, speed, work, peak_gb(device)])
    table.print()


if __name__ == "__main__":
    main()
