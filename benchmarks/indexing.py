"""Speed and memory of `rayembed index`.

`speed`: documents a second of a whole job into a store (reading, parts, vectors, store), of the
bare encoder, and of sentence-transformers' `encode` in its best setting, in turns in one process;
the ratios are of the medians. `memory`: peak memory of the job's process and of each process that
it starts, for two numbers of short made-up documents with a model of two layers. Run:
python benchmarks/indexing.py speed --documents 4000
python benchmarks/indexing.py memory --rows 100000 1000000
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

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


def job(folder, reference, path, dtype, store, rows_per_part):
    """Build an index in this process; return its counts."""
    from rayembed.config.settings import parse
    from rayembed_extras.indexing.build import build_index
    from rayembed_extras.indexing.settings import IndexRun

    values = {
        "name": "docs",
        "model": {"reference": reference, "dtype": dtype},
        "documents": {"path": str(path)},
        "store": {"kind": store},
        "rows_per_part": rows_per_part,
        "placement": {"storage_path": str(folder), "runtime": "local"},
    }
    return build_index(parse(IndexRun, values)).counts


def write_texts(path, texts):
    """JSONL of texts with ids."""
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")


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


class Watched:
    """Peak memory of this process, and of each process below it, in MB."""

    def __init__(self):
        self.peaks = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        import psutil

        own = psutil.Process()
        while not self._ended.wait(0.2):
            for process in (own, *own.children(recursive=True)):
                try:
                    memory = process.memory_info().rss / 1e6
                except psutil.Error:
                    continue
                before = self.peaks.get(process.pid, 0)
                self.peaks[process.pid] = max(before, memory)

    @property
    def told(self):
        """Peak of this process, and the largest of the others."""
        own = self.peaks.get(os.getpid(), 0.0)
        others = [peak for pid, peak in self.peaks.items() if pid != os.getpid()]
        return {"driver": round(own), "workers": round(max(others, default=0.0))}


def one_memory(arguments):
    """Build an index of one size; print its counts and peaks as JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_two_layers(folder / "model")
        with (folder / "docs.jsonl").open("w") as file:
            for start in range(0, arguments.of, 10_000):
                texts = made_up(min(10_000, arguments.of - start), 8, seed=start)
                for number, text in enumerate(texts, start):
                    file.write(json.dumps({"id": f"doc-{number}", "text": text}) + "\n")
        with Watched() as watched:
            counts = job(
                folder, str(folder / "model"), folder / "docs.jsonl", "float32", "parquet", 16_384
            )
    shown = {name: counts[name] for name in ("new", "seconds_in_all", "texts_per_second")}
    print(json.dumps({**watched.told, **shown}))


def memory(arguments):
    """Print the peaks for each number of rows, each in a process of its own, and their ratio."""
    found = {}
    for rows in arguments.rows:
        command = [sys.executable, __file__, "one-memory", "--of", str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        found[rows] = json.loads(done.stdout.splitlines()[-1])
        print(f"{rows:,} documents: {found[rows]}", flush=True)
    first, last = (found[rows] for rows in (min(found), max(found)))
    for name in ("driver", "workers"):
        if first[name] and last[name]:
            print(f"{name}: {last[name] / first[name]:.3f} times the memory")


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
    asked = kinds.add_parser("one-memory")
    asked.add_argument("--of", type=int, required=True)
    asked.set_defaults(act=one_memory)
    given = parser.parse_args()
    given.act(given)
