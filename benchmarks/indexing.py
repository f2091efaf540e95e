"""Speed and memory of `rayembed index`.

`speed`: documents a second of a whole job into a store (reading, parts, vectors, store), of the
bare encoder, and of sentence-transformers' `encode` in its best setting, in turns in one process;
the ratios are of the medians. `memory`: peak memory of the job's process and of each worker, for
two numbers of short made-up documents with a model of two layers. Run:
python benchmarks/indexing.py speed --documents 4000
python benchmarks/indexing.py memory --rows 100000 1000000 --runtime ray
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from index_cluster import TwoNodes, Watched

MINILM = "all-MiniLM-L6-v2"


def made_up(number, words, seed=0):
    """Texts of random words, of `words` on average, half to one and a half times as many."""
    rng = np.random.default_rng(seed)
    vocabulary = np.array([f"{a}{b}" for a in SYLLABLES for b in SYLLABLES])
    lengths = rng.integers(max(1, words // 2), words + words // 2 + 1, number)
    drawn = vocabulary[rng.integers(0, len(vocabulary), int(lengths.sum()))]
    ends = np.cumsum(lengths)
    return [" ".join(part) for part in np.split(drawn, ends[:-1])]


SYLLABLES = [f"{c}{v}" for c in "bdfgklmnprst" for v in "aeiou"]


def sample(number):
    """Summaries of the sample of Wikipedia, which lie in the package index; repeated if few."""
    from rayembed.data.sources.cells import read_column
    from rayembed.data.sources.files import list_pieces
    from rayembed.data.sources.rows import Row, read_rows
    from rayembed.recipes.catalogue import get_recipe

    source = get_recipe("biencoder-quickstart").data.datasets[0].source
    texts = {}
    for piece in list_pieces(source.path):
        for row in read_rows(piece):
            text = read_column(row.values, "positive") if isinstance(row, Row) else None
            if isinstance(text, str):
                texts[text] = None
    return list(texts)[:number]


def job(folder, reference, path, dtype, store, rows_per_part, runtime="local"):
    """Build an index in this process or on Ray; return its counts."""
    from rayembed.config.settings import parse
    from rayembed_extras.indexing.build import build_index
    from rayembed_extras.indexing.settings import IndexRun

    values = {
        "name": "docs",
        "model": {"reference": reference, "dtype": dtype},
        "documents": {"path": str(path)},
        "store": {"kind": store},
        "rows_per_part": rows_per_part,
        "placement": {"storage_path": str(folder), "runtime": runtime},
    }
    return build_index(parse(IndexRun, values)).counts


def write_texts(path, texts):
    """JSONL of texts with ids."""
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")


def write_made_up(path, number, changed=frozenset()):
    """JSONL of short documents; those of the changed numbers have another text, half of them
    another id as well.
    """
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, number, 10_000):
            texts = made_up(min(10_000, number - start), 8, seed=start)
            for place, text in enumerate(texts, start):
                kind = "new" if place in changed and place % 2 else "doc"
                row = {
                    "id": f"{kind}-{place}",
                    "text": f"{text} {SYLLABLES[0] * 2}" if place in changed else text,
                    "year": 1900 + place % 120,
                    "lang": None if place % 3 else "en",
                }
                file.write(json.dumps(row) + "\n")


class Encoders:
    """The bare encoder in the job's number type, and sentence-transformers in several settings."""

    def __init__(self, reference, dtype):
        from rayembed.assets.resolver import resolve_model
        from rayembed.config.types import expanded_name
        from rayembed.models.loading.files import weights_fingerprint
        from rayembed_extras.indexing.embed import IndexModelSpec, LoadedModel

        self.reference = expanded_name(reference)
        self.folder = resolve_model(self.reference)
        weights = weights_fingerprint(self.folder)
        spec = IndexModelSpec(self.reference, weights, None, None, 384, dtype, None, "")
        self.bare = LoadedModel(spec, "cpu")

    def peers(self, texts):
        """Settings of sentence-transformers by name: number types and batch sizes."""
        import torch
        from sentence_transformers import SentenceTransformer

        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            model = SentenceTransformer(
                str(self.folder), device="cpu", model_kwargs={"dtype": dtype}
            )
            for size in (8, 32, 128):
                model.encode(texts[:64], batch_size=size)
                yield f"sentence-transformers {name}, batch {size}", model, size


def speed(arguments):
    """Print documents a second of each way, and the ratios."""
    texts = made_up(arguments.documents, 60) if arguments.made_up else sample(arguments.documents)
    encoders = Encoders(MINILM, arguments.dtype)
    few = texts[: max(64, len(texts) // 8)]
    best, peer = 0.0, None
    for name, model, size in encoders.peers(few):
        began = time.perf_counter()
        model.encode(few, batch_size=size)
        rate = len(few) / (time.perf_counter() - began)
        print(f"{name}: {rate:,.1f} documents/s of {len(few)}", flush=True)
        if rate > best:
            best, peer = rate, (name, model, size)
    name, model, size = peer
    encoders.bare.encode(few)
    ways = {
        name: lambda _: model.encode(texts, batch_size=size),
        "bare encoder": lambda _: encoders.bare.encode(texts),
    }
    for store in arguments.stores:

        def whole(folder, store=store):
            job(folder, encoders.reference, folder / "docs.jsonl", arguments.dtype, store, 16_384)

        ways[f"index into {store}"] = whole
    rates = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, act in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                write_texts(Path(folder, "docs.jsonl"), texts)
                began = time.perf_counter()
                act(Path(folder))
                rates[way].append(len(texts) / (time.perf_counter() - began))
        print({way: round(found[-1], 1) for way, found in rates.items()}, flush=True)
    medians = {way: statistics.median(found) for way, found in rates.items()}
    for way, rate in medians.items():
        told = f"{rate / medians['bare encoder']:.3f} of the bare encoder"
        print(f"{way}: {rate:,.1f} documents/s, {told}, {rate / medians[name]:.2f} of {name}")


def save_two_layers(folder):
    """An untrained encoder of two layers, 64 wide, with a tokenizer of words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    for word in (f"{a}{b}" for a in SYLLABLES for b in SYLLABLES):
        words[word] = len(words)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)


def one_memory(arguments):
    """Build an index of the documents in a folder; print its counts as JSON."""
    folder = arguments.folder
    counts = job(
        *(folder, str(folder / "model"), folder / "docs.jsonl"),
        *("float32", arguments.store, 16_384, arguments.runtime),
    )
    shown = ("new", "seconds_in_all", "texts_per_second")
    print(json.dumps({name: counts[name] for name in shown}))


def memory(arguments):
    """Print the peaks for each number of rows, each in a process and a cluster of its own, and
    their ratios.
    """
    found = {}
    for rows in arguments.rows:
        with ExitStack() as opened:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            save_two_layers(folder / "model")
            write_made_up(folder / "docs.jsonl", rows)
            environment = {}
            if arguments.runtime == "ray":
                nodes = opened.enter_context(TwoNodes())
                environment["RAY_ADDRESS"] = nodes.address
            options = ["--runtime", arguments.runtime, "--store", arguments.store]
            command = [sys.executable, __file__, "one-memory", "--folder", str(folder), *options]
            process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
            )
            with Watched(process.pid) as watched:
                out, _ = process.communicate()
            if process.returncode:
                raise SystemExit(process.returncode)
        found[rows] = watched.peaks()
        print(f"{rows:,} documents: {found[rows]}, {out.splitlines()[-1]}", flush=True)
    first, last = (found[rows] for rows in (min(found), max(found)))
    for process in first.keys() & last.keys():
        ratios = {
            name: round(last[process][name] / first[process][name], 3) for name in first[process]
        }
        print(f"{process}: {ratios} times the memory")


if __name__ == "__main__":
    # Else each way takes the threads that other processes leave free when it begins.
    os.environ.setdefault("RAYEMBED_THREADS", str(len(os.sched_getaffinity(0))))
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(required=True)
    asked = kinds.add_parser("speed")
    asked.add_argument("--documents", type=int, default=4000)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    asked.add_argument("--stores", nargs="*", default=["parquet"])
    asked.add_argument("--made-up", action="store_true")
    asked.set_defaults(act=speed)
    asked = kinds.add_parser("memory")
    asked.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    asked.set_defaults(act=memory)
    inner = kinds.add_parser("one-memory")
    inner.add_argument("--folder", type=Path, required=True)
    inner.set_defaults(act=one_memory)
    for of in (asked, inner):
        of.add_argument("--runtime", choices=["local", "ray"], default="local")
        of.add_argument("--store", default="parquet")
    given = parser.parse_args()
    given.act(given)
