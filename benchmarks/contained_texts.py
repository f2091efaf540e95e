"""How often unrelated real texts share an n-gram with benchmark texts, and what finding it costs.

    python benchmarks/contained_texts.py [--documents 200000]

Half of the Wikipedia sample's articles (by a hash of their titles) stand for a benchmark, the other
half for training documents: what is found is found falsely, or is a phrase that both articles have.
Then benchmark texts are planted in documents, as they are and with every eighth word changed.
"""

import argparse
import json
import resource
import time
from collections.abc import Sequence

import numpy as np

from rayembed.assets.resolver import resolve
from rayembed.config.mining import Containment
from rayembed.data.cleaning.evaluation_texts import GramIndex, grams_of, share_contained
from rayembed.data.hashes import text_hash
from rayembed.data.words import words

_AT_ONCE = 8192


def read(language: str) -> tuple[list[str], list[str]]:
    """Texts of the benchmark's articles and of the documents."""
    ending = "" if language == "en" else f"?language={language}"
    path = resolve(f"sample://wikipedia/texts.jsonl{ending}")
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    texts = sorted(set(texts), key=text_hash)
    return texts[::2], texts[1::2]


def sentences(texts: Sequence[str]) -> list[str]:
    """First sentences: of the length of benchmarks' questions and captions."""
    return [text.split(". ")[0] for text in texts]


def find(index: GramIndex, texts: Sequence[str]) -> np.ndarray:
    """Benchmark text found in each, a part at a time."""
    starts = range(0, len(texts), _AT_ONCE)
    return np.concatenate([index.find(texts[i : i + _AT_ONCE]) for i in starts])


def main() -> None:
    """Print false matches, planted ones and rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    count = parser.parse_args().documents
    for language in ("en", "fr", "es"):
        benchmark, documents = read(language)
        kinds = {"sentences": sentences(benchmark), "articles": benchmark}
        for kind, texts in kinds.items():
            for ngram, shortest in ((13, 8), (13, 5), (10, 8), (8, 8)):
                settings = Containment(ngram=ngram, shortest=shortest)
                grams = grams_of(texts, settings)
                found = find(GramIndex(grams), documents)
                hits = np.flatnonzero(found >= 0)
                print(
                    f"{language} {len(texts)} {kind} as benchmark, {len(documents)} documents, "
                    f"ngram {ngram}, shortest {shortest}: {len(grams.hashes):,} n-grams, "
                    f"{len(hits)} found ({len(hits) / len(documents):.2%})",
                    flush=True,
                )
                if language == "en" and ngram == 13:
                    for hit in hits[:6]:
                        text = texts[found[hit]]
                        share = share_contained(documents[hit], text, settings)
                        print(f"    {share:.2f} {text[:90]!r} in {documents[hit][:90]!r}")
        settings, texts = Containment(), kinds["sentences"]
        index = GramIndex(grams_of(texts, settings))
        long = [text for text in texts if len(words(text)) >= settings.shortest]
        pairs = list(zip(long, documents, strict=False))
        planted = [f"{document} {text.upper()} {document}" for text, document in pairs]
        changed = [
            " ".join("x" if i % 8 == 4 else word for i, word in enumerate(text.split()))
            for text, _ in pairs
        ]
        print(
            f"{language}: {int((find(index, planted) >= 0).sum())} of {len(planted)} planted "
            f"sentences found, {int((find(index, changed) >= 0).sum())} with every eighth word "
            "changed",
            flush=True,
        )
    benchmark, documents = read("en")
    index = GramIndex(grams_of(benchmark, Containment()))
    many = [documents[i % len(documents)] for i in range(count)]
    began = time.process_time()
    find(index, many)
    seconds = time.process_time() - began
    total = sum(len(words(text)) for text in documents) / len(documents)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{count:,} documents of {total:.0f} words against {len(index.grams.hashes):,} n-grams: "
        f"{count / seconds:,.0f} documents a CPU-second; peak memory {peak:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
