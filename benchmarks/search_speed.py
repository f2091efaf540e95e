"""Exact top-k: rayembed's search against FAISS's flat index, in one run on the same vectors.

Random unit vectors (Q queries, N documents, D dimensions), all cores, several rounds in turn. What
is found must be the same but for the order of equal scores. CPU seconds tell more than seconds
where others are at work. Run: python benchmarks/search_speed.py
"""

import argparse
import statistics
import time

import numpy as np


def unit_vectors(count, width, seed):
    vectors = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def ours(queries, documents, k):
    from rayembed.search.exact import top_k

    return top_k(queries, [documents], k)


def faiss_flat(queries, documents, k):
    import faiss

    return faiss.knn(queries, documents, k, metric=faiss.METRIC_INNER_PRODUCT)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=100_000)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--k", type=int, default=71)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    queries = unit_vectors(args.queries, args.width, 0)
    documents = unit_vectors(args.documents, args.width, 1)
    seconds, found = {"faiss": [], "rayembed": []}, {}
    used = {side: [] for side in seconds}
    for _ in range(args.rounds):
        for side, search in (("faiss", faiss_flat), ("rayembed", ours)):
            began, before = time.perf_counter(), time.process_time()
            found[side] = search(queries, documents, args.k)
            seconds[side].append(time.perf_counter() - began)
            used[side].append(time.process_time() - before)
            print(f"{side}: {seconds[side][-1]:.1f} s", flush=True)
    apart = np.abs(found["faiss"][0] - found["rayembed"][0]).max()
    pairs = zip(found["faiss"][1], found["rayembed"][1], strict=True)
    same = np.mean([np.isin(theirs, ours).mean() for theirs, ours in pairs])
    middle = {side: statistics.median(times) for side, times in seconds.items()}
    print("| side | seconds (median) | over FAISS | CPU seconds (median) |\n|---|---|---|---|")
    for side, value in middle.items():
        spent = statistics.median(used[side])
        print(f"| {side} | {value:.1f} | {middle['faiss'] / value:.2f} | {spent:.1f} |")
    print(f"ids the same: {same:.5%}; scores apart at most {apart:.1e}")


if __name__ == "__main__":
    main()
