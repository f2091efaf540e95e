"""The whole mining step on one GPU beside sentence-transformers' `mine_hard_negatives`, in one run.

Pairs of random words, a teacher of BERT's base size with random weights in bfloat16, the same rule,
depth and number. First the negatives of some queries are compared with those of a search by hand in
float32. sentence-transformers' side needs the package datasets; without it only rayembed's runs.
Run: python -m benchmarks.gpu.mining [--toy] [--pairs 50000]
"""

import importlib.util
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.gpu import made_up, predictions
from benchmarks.gpu.measuring import (
    Table,
    arguments,
    check,
    device_of,
    gpu_name,
    machine_line,
    peak_gb,
    reset_peak,
)
from benchmarks.mining_speed import DEPTH, MARGIN, NUM_NEGATIVES, theirs


def data_of(folder: Path, pairs: list[list[str]], teacher: Path, dtype: str, longest: int):
    """Context, settings and records of the pairs, made before the clock starts."""
    from rayembed.config.data import DataConfig, DatasetConfig
    from rayembed.config.data_run import DataRun
    from rayembed.config.mining import MiningConfig
    from rayembed.data.engine.artifacts import PipelineContext
    from rayembed.data.engine.here import execute_here
    from rayembed.data.mining.rules import PercPos
    from rayembed.data.prepare import prepare_datasets
    from rayembed.data.sources.pairs import PairsSource

    lines = [json.dumps({"query": query, "positive": document}) for query, document in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    mining = MiningConfig(
        teacher=str(teacher),
        dtype=dtype,
        max_length=longest,
        rule=PercPos(max_relative_score=1 - MARGIN),
        num_negatives=NUM_NEGATIVES,
        candidates=DEPTH,
        near_duplicate=None,
    )
    source = PairsSource(path=str(folder / "pairs.jsonl"))
    dataset = DatasetConfig(name="pairs", source=source, mining=mining)
    context = PipelineContext(str(folder / "out"), 0, execute_here)
    run = DataRun(name="speed", data=DataConfig(datasets=(dataset,)))
    return context, dataset, prepare_datasets(run, context, until="records")["pairs"][-1]


def ours(context, dataset, before, device: torch.device):
    """Seconds, and (query, positive) → negatives."""
    from rayembed.data.engine.parts import read_records
    from rayembed.data.mining.mine import make_mined
    from rayembed.data.sources.tasks import HeldOut
    from rayembed.data.vectors.teacher import load_teacher, weights_of

    load_teacher(dataset.mining, weights_of(dataset.mining.teacher), device.type)
    began = time.perf_counter()
    mined = make_mined(context, dataset, before, HeldOut())
    seconds = time.perf_counter() - began
    records = [record for part in mined.parts for record in read_records(part.path)]
    return seconds, {(r.query, r.positives[0]): [n.text for n in r.negatives] for r in records}


def by_hand(mine, encode, number: int) -> float:
    """Share of the negatives of some queries that a search by hand in float32 finds too."""
    documents = list(dict.fromkeys(positive for _, positive in mine))
    vectors = encode(documents)
    place = {document: at for at, document in enumerate(documents)}
    same = total = 0
    for query, positive in list(mine)[:number]:
        scores = vectors @ encode([query])[0]
        limit = scores[place[positive]] - MARGIN * abs(scores[place[positive]])
        order = np.argsort(-scores, kind="stable")[:DEPTH]
        allowed = [documents[at] for at in order if scores[at] <= limit]
        wanted = [document for document in allowed if document != positive][:NUM_NEGATIVES]
        same += len(set(wanted) & set(mine[query, positive]))
        total += max(len(wanted), len(mine[query, positive]))
    return same / max(total, 1)


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=50_000)
    parser.add_argument("--max-length", type=int, default=256)
    options = parser.parse_args(given)
    if options.toy:
        options.pairs, options.max_length = 120, 40
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    shape = made_up.TOY_ENCODER if options.toy else made_up.published_shape(made_up.BERT_BASE)
    pairs = made_up.pairs(options.pairs, int(shape["vocab_size"]), longest=options.max_length)
    print(machine_line(device))
    gpu = predictions.gpu_of(gpu_name(device))
    title = f"Mining for {options.pairs:,} pairs. {machine_line(device)}."
    heads = ["side", "seconds", f"predicted, {gpu}", "pairs/s", "negatives", "peak GB"]
    table = Table(title, heads, options.record)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = made_up.model_folder(folder / "teacher", shape, device, "float32")
        step = data_of(folder, pairs, teacher, dtype, options.max_length)
        reset_peak(device)
        seconds, mine = ours(*step, device)
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(
            str(teacher), device=str(device), model_kwargs={"dtype": torch.float32}
        )
        model.max_seq_length = options.max_length
        share = by_hand(
            mine,
            lambda texts: model.encode(texts, normalize_embeddings=True, show_progress_bar=False),
            20,
        )
        # In bfloat16 neighbours that score alike change places, at the rule's limit above all.
        needed = 0.8 if dtype == "bfloat16" else 0.99
        check(share >= needed, f"{share:.1%} of the negatives are those of a search by hand")
        expected = predicted_seconds(teacher, pairs, gpu)
        found = sum(map(len, mine.values()))

        def add(side: str, seconds: float, expected: str, found: int | str) -> None:
            speed = f"{len(mine) / seconds:,.0f}"
            table.add([side, f"{seconds:.1f}", expected, speed, found, peak_gb(device)])

        add("rayembed", seconds, f"{expected:.2g}", found)
        if importlib.util.find_spec("datasets"):
            model.to(getattr(torch, dtype))
            reset_peak(device)
            add("sentence-transformers", theirs(list(mine), model)[0], "–", "–")
        else:
            print("the package datasets is not installed: sentence-transformers' side is left out")
    table.print()


def predicted_seconds(teacher: Path, pairs: list[list[str]], gpu: str) -> float:
    """Seconds of encoding all texts by one pass after the other and of one search.

    Reading, tokenising and writing are left out: they run beside it, or should.
    """
    from rayembed.models.biencoder.config import BiEncoderConfig

    settings = BiEncoderConfig(backbone={"path": str(teacher), "dtype": "bfloat16"})
    model = predictions.Model(settings, predictions.MACHINES[gpu])
    lengths = [len(text.split()) + 2 for pair in pairs for text in pair]
    width = json.loads((teacher / "config.json").read_text())["hidden_size"]
    searched = predictions.search_seconds(len(pairs), len(pairs), width, 2, model.machine)
    return model.encoding(lengths).seconds + searched


if __name__ == "__main__":
    main()
