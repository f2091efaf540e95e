"""A small fine-tuning by rayembed and by sentence-transformers side by side, on the same pairs.

Each side trains in a process of its own from the same start model, with the same loss, steps,
batch, learning rate and lengths. Measured are CPU-seconds with children, memory (PSS summed over
the processes, sampled), processes, seconds until the first step is done, and nDCG@10 over queries
that no side has seen, by the same evaluator in a process after it. rayembed's side is the whole of
`rayembed.train`: cleaning, split, plan, training, export, its own scores, plots and registry;
sentence-transformers' side is its trainer and `save`.

    python benchmarks/small_run.py --model all-MiniLM-L6-v2 --seeds 0 1 2
"""

import argparse
import inspect
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SETTINGS = {"steps": 60, "batch": 16, "learning_rate": 1e-4, "temperature": 0.05, "length": 48}
SIDES = ("sentence-transformers", "rayembed")


def sentence_transformers_side(model, pairs, output, seed, given, told):
    """Thirty lines of sentence-transformers."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from transformers import TrainerCallback

    class Told(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            told(state.global_step)

    encoder = SentenceTransformer(model, device="cpu")
    encoder.max_seq_length = given["length"]
    arguments = SentenceTransformerTrainingArguments(
        output_dir=output,
        max_steps=given["steps"],
        per_device_train_batch_size=given["batch"],
        learning_rate=given["learning_rate"],
        warmup_steps=given["steps"] // 10,
        seed=seed,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    trainer = SentenceTransformerTrainer(
        model=encoder,
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"anchor": query, "positive": document} for query, document in pairs]
        ),
        loss=losses.MultipleNegativesRankingLoss(encoder, scale=1 / given["temperature"]),
        callbacks=[Told()],
    )
    trainer.train()
    encoder.save(f"{output}/model")
    return f"{output}/model"


def rayembed_side(model, pairs, output, seed, given, told):
    """The same by `rayembed.train`."""
    import rayembed
    from rayembed.losses.infonce import InfoNCE
    from rayembed.training.trainer import Callback

    class Told(Callback):
        def on_step_end(self, record):
            told(record["step"])

    return rayembed.train(
        model,
        pairs,
        loss=InfoNCE(temperature=given["temperature"]),
        steps=given["steps"],
        batch_size=given["batch"],
        learning_rate=given["learning_rate"],
        output=output,
        callbacks=[Told()],
        settings={
            "seed": seed,
            "model.query_max_length": given["length"],
            "model.document_max_length": given["length"],
            "model.backbone.dtype": "float32",
            "evaluation.baselines": [],
            "evaluation.guard": None,
            "evaluation.benchmarks": [],
            "stages.finetune.optimizer.warmup_steps": given["steps"] // 10,
        },
    ).folder


def lines_typed(side):
    """Lines of a side's code, without its head, its docstring, blank ones and the clock."""
    code = [line for line in inspect.getsource(side).splitlines() if line.strip()][2:]
    clock = ("Callback", "class Told", "def on_step_end", "told(", "callbacks=")
    return sum(not any(word in line for word in clock) for line in code)


def scored(model, held_out, given):
    """nDCG@10 of held-out queries over all their documents."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    encoder = SentenceTransformer(model, device="cpu")
    encoder.max_seq_length = given["length"]
    documents = {f"d{i}": text for i, text in enumerate(dict.fromkeys(d for _, d in held_out))}
    names = {text: name for name, text in documents.items()}
    queries = {f"q{i}": query for i, (query, _) in enumerate(held_out)}
    judged = {f"q{i}": {names[document]} for i, (_, document) in enumerate(held_out)}
    found = InformationRetrievalEvaluator(queries, documents, judged, name="held")(encoder)
    return found["held_cosine_ndcg@10"]


def one_side(job):
    """Train in this process and print what it took."""
    first = {}

    def told(step):
        first.setdefault("seconds", time.time() - job["began"])

    side = rayembed_side if job["side"] == "rayembed" else sentence_transformers_side
    model = side(job["model"], job["pairs"], job["output"], job["seed"], SETTINGS, told)
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in usage)
    print(json.dumps({"model": model, "cpu": cpu, "first": first["seconds"]}))


def measured(job):
    """One side in a process of its own; what it printed, and the memory and processes it had."""
    with (
        tempfile.NamedTemporaryFile("w") as asked,
        tempfile.TemporaryFile("w+") as out,
        tempfile.NamedTemporaryFile("w") as errors,
    ):
        began = time.time()
        json.dump({**job, "began": began}, asked)
        asked.flush()
        words = [sys.executable, __file__, "--job", asked.name]
        process = psutil.Popen(words, stdout=out, stderr=errors)
        memory, processes = 0, 0
        while process.poll() is None:
            every = [process, *_children(process)]
            memory, processes = max(memory, sum(map(_pss, every))), max(processes, len(every))
            time.sleep(0.25)
        if process.returncode:
            raise SystemExit(f"{job['side']} failed:\n{Path(errors.name).read_text()[-4000:]}")
        out.seek(0)
        printed = json.loads(out.read().strip().splitlines()[-1])
    took = {"wall": time.time() - began, "memory": memory / 2**30, "processes": processes}
    return {**printed, **took}


def _children(process):
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _pss(process):
    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return 0


def held_out_score(model, held_out):
    """Score of a model by an evaluator in a process of its own."""
    with tempfile.NamedTemporaryFile("w") as asked:
        json.dump({"score": model, "pairs": held_out}, asked)
        asked.flush()
        words = [sys.executable, __file__, "--job", asked.name]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(start, results):
    """Medians of each side as Markdown."""
    rows = {
        "CPU-seconds": ("cpu", "{:.0f}"),
        "wall seconds": ("wall", "{:.0f}"),
        "seconds to the first step": ("first", "{:.0f}"),
        "peak memory (PSS), GiB": ("memory", "{:.2f}"),
        "processes": ("processes", "{:.0f}"),
    }
    lines = [f"| | {' | '.join(SIDES)} | ratio |", "| --- | ---: | ---: | ---: |"]
    for label, (key, shown) in rows.items():
        theirs, ours = (statistics.median(r[key] for r in results[side]) for side in SIDES)
        values = f"{shown.format(theirs)} | {shown.format(ours)}"
        lines.append(f"| {label} | {values} | {ours / theirs:.2f} |")
    theirs, ours = map(lines_typed, (sentence_transformers_side, rayembed_side))
    lines.append(f"| lines typed | {theirs} | {ours} | {ours / theirs:.2f} |")
    scores = [", ".join(f"{r['score']:.3f}" for r in results[side]) for side in SIDES]
    lines.append(f"| held-out nDCG@10 (start {start:.3f}) | {' | '.join(scores)} | |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", help="JSONL of query and positive (default: the sample's)")
    parser.add_argument("--rows", type=int, default=3000, help="how many of them, drawn by seed 0")
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="folder or short name")
    parser.add_argument("--held-out", type=int, default=250, help="pairs that no side trains on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        job = json.loads(Path(given.job).read_text())
        if "score" in job:
            print(json.dumps(scored(job["score"], job["pairs"], SETTINGS)))
        else:
            one_side(job)
        return
    from rayembed.assets.resolver import resolve, resolve_model

    model = str(resolve_model(given.model))
    lines = resolve(given.pairs or "sample://wikipedia/sentence.jsonl").read_text().splitlines()
    pairs = [(row["query"], row["positive"]) for row in map(json.loads, lines)]
    random.Random(0).shuffle(pairs)
    pairs = pairs[: given.rows]
    documents = {document for _, document in pairs[: given.held_out]}
    held_out = [pair for pair in pairs if pair[1] in documents]
    rest = [pair for pair in pairs if pair[1] not in documents]
    results = {side: [] for side in SIDES}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            for side in SIDES:
                output = f"{folder}/{side}-{seed}"
                job = {"side": side, "model": model, "pairs": rest, "output": output}
                found = measured({**job, "seed": seed})
                found["score"] = held_out_score(found["model"], held_out)
                results[side].append(found)
                loads.append(os.getloadavg()[0])
                print(side, seed, found, file=sys.stderr)
        print(table(held_out_score(model, held_out), results))
    print(f"\n{len(rest)} pairs, {SETTINGS}, load {min(loads):.1f} to {max(loads):.1f}")


if __name__ == "__main__":
    main()
