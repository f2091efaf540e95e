"""Pairs per second of training: rayembed against sentence-transformers, in one run.

All sides fine-tune all-MiniLM-L6-v2 (all weights, in-batch negatives, max length 128) on the same
Wikipedia pairs (one sentence → the rest of its article), with all cores and in the number type that
this CPU computes fast (bfloat16 where it has units for it, else float32):

- `peer`: SentenceTransformerTrainer with MultipleNegativesRankingLoss, bfloat16 by autocast;
- `bare`: our step in a plain loop with torch's AdamW; no Ray, no DeepSpeed, no plan; in bfloat16
  with the job's fp32 sums of gradients and fp32 weights, which small updates need;
- `job`: the same stage as a job runs it in its own process: steps of a plan, DeepSpeed;
- `ray`: the same on a Ray cluster of this machine, by Ray Train.

Each side runs in a process of its own, in turn, `--rounds` times; start-up and the first steps are
not counted. `--busy` has another process keep one core at work beside every side; the job then
takes as many threads as `placement.threads_per_worker=auto` finds. Run:
python benchmarks/train_speed.py --batch 64 256
python benchmarks/train_speed.py --batch 64 --busy
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

WARMUP = 2
SIDES = ("peer", "bare", "job", "ray")
MAX_LENGTH = 128
MICRO_BATCH_TOKENS = 1024
BUSY = "TRAIN_SPEED_BUSY"


def pairs(count):
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia

    lines = resolve(Wikipedia(held_out=0).pairs("sentence").path).read_text().splitlines()
    kept = [(row["query"], row["positive"]) for row in map(json.loads, lines)]
    random.Random(0).shuffle(kept)
    return [kept[i % len(kept)] for i in range(count)]


def make_run(folder, batch, steps):
    from rayembed.config.run import Run
    from rayembed.config.settings import parse
    from rayembed.machine.cores import num_cores
    from rayembed.machine.hardware import auto_precision
    from rayembed.recipes.sample import MINILM

    return parse(
        Run,
        {
            "name": "speed",
            "model": {
                "kind": "biencoder",
                "backbone": {"path": MINILM, "dtype": auto_precision("cpu").dtype},
                "query_max_length": MAX_LENGTH,
                "document_max_length": MAX_LENGTH,
            },
            "data": {
                "root": str(folder),
                "datasets": [{"name": "pairs", "source": {"kind": "pairs", "path": "pairs.jsonl"}}],
            },
            "stages": [
                {
                    "name": "only",
                    "datasets": {"pairs": 1},
                    "batch": {
                        "global_pairs": batch,
                        "num_negatives": 0,
                        "in_batch_negatives": True,
                    },
                    "loss": {"temperature": 0.05},
                    "optimizer": {"learning_rate": 2e-5},
                    "steps": steps,
                }
            ],
            "placement": {
                "storage_path": str(folder / "out"),
                "zero_stage": 2,
                "threads_per_worker": num_cores(),
                "grad_cache": False,
                "micro_batch_tokens": MICRO_BATCH_TOKENS,
            },
        },
    )


def rate(seconds, batch):
    return batch * len(seconds[WARMUP:]) / sum(seconds[WARMUP:])


def peer(batch, steps):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.training_args import SentenceTransformerTrainingArguments
    from transformers import TrainerCallback

    from rayembed.assets.resolver import resolve
    from rayembed.machine.hardware import auto_precision
    from rayembed.recipes.sample import MINILM

    model = SentenceTransformer(str(resolve(MINILM)), device="cpu")
    model.max_seq_length = MAX_LENGTH
    chosen = pairs(batch * steps)
    data = Dataset.from_dict({"anchor": [q for q, _ in chosen], "positive": [d for _, d in chosen]})
    seconds = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_args, **_kwargs):
            self.last = time.perf_counter()

        def on_step_end(self, *_args, **_kwargs):
            now = time.perf_counter()
            seconds.append(now - self.last)
            self.last = now

    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            max_steps=steps,
            learning_rate=2e-5,
            bf16=auto_precision("cpu").dtype == "bfloat16",
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            loss=MultipleNegativesRankingLoss(model, scale=20.0),
            callbacks=[Clock()],
        ).train()
    return rate(seconds, batch)


def bare(batch, steps):
    import torch

    from rayembed.assets.resolver import resolve_model
    from rayembed.data.plan.step_batch import make_step_batch
    from rayembed.data.records import Record
    from rayembed.machine.allocator import freed_memory_kept
    from rayembed.models.loading.build import build_model
    from rayembed.recipes.sample import MINILM
    from rayembed.training.contrastive.engine_module import EngineModule
    from rayembed.training.contrastive.step import run_step
    from rayembed.training.objective import StepSettings

    run = make_run(Path("/nowhere"), batch, steps)
    model = build_model(run.model, resolve_model(MINILM), seed=0).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    for p in weights:
        p.grad_dtype = torch.float32
    masters = [torch.nn.Parameter(p.detach().float()) for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=2e-5, fused=True)
    passable = EngineModule(model)
    settings = StepSettings(MICRO_BATCH_TOKENS, run.placement.grad_cache, torch.device("cpu"))
    chosen, seconds = pairs(batch * steps), []
    with freed_memory_kept():
        last = time.perf_counter()
        for step in range(steps):
            rows = chosen[step * batch : (step + 1) * batch]
            records = [Record(str(i), q, (d,), "pairs") for i, (q, d) in enumerate(rows)]
            made = make_step_batch(step, records, 0, model.tokenizer)
            run_step(
                model, passable, lambda loss, _: loss.backward(), made, run.stages[0], settings
            )
            for p, master in zip(weights, masters, strict=True):
                master.grad, p.grad = p.grad, None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
            seconds.append(time.perf_counter() - last)
            last = time.perf_counter()
    return rate(seconds, batch)


def job(batch, steps):
    return staged(batch, steps, "local")


def ray(batch, steps):
    return staged(batch, steps, "ray")


def staged(batch, steps, runtime):
    import logging

    from rayembed.config.data_run import data_of
    from rayembed.config.override import override
    from rayembed.data.prepare import prepare
    from rayembed.pipeline.run.runtime import runtime_of, with_threads
    from rayembed.registry.metrics_log import MetricsLog
    from rayembed.training.job import StageJob

    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps({"query": q, "positive": d}) for q, d in pairs(batch * steps)]
        (folder / "pairs.jsonl").write_text("\n".join(lines))
        threads = ["placement.threads_per_worker=auto"] if os.environ.get(BUSY) else []
        run = override(make_run(folder, batch, steps), [f"placement.runtime={runtime}", *threads])
        place = runtime_of(run.placement)
        place.start()
        run = with_threads(run, place)
        plan = prepare(run, place.data_context(data_of(run)))["only"]
        job = StageJob(run, 0, plan, None, str(folder / "weights.safetensors"))
        place.train(job, str(folder / "stage"), folder / "metrics.jsonl", 0)
        records = MetricsLog(folder / "metrics.jsonl").records()
    return rate([record["seconds"] for record in records], batch)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="with another process at work")
    parser.add_argument("--side", choices=SIDES, help="run one side only and print its rate")
    args = parser.parse_args()
    if args.side:
        print("RATE", globals()[args.side](args.batch[0], args.steps))
        return
    plain = dict(os.environ)  # rayembed's import changes it
    from rayembed.machine.hardware import auto_precision
    from rayembed.registry.provenance import cpu_summary
    from rayembed.training.train_function_on_ray import worker_environment

    # The bare loop gets the job's threads.
    theirs = {**plain, **worker_environment(make_run(Path("/nowhere"), 64, 1).placement)}
    theirs.pop("LD_PRELOAD", None)
    environments = {"bare": theirs}
    if args.busy:
        environments |= {side: {**plain, BUSY: "1"} for side in ("job", "ray")}
    print(f"{cpu_summary()}, {auto_precision('cpu')}{', one core busy' * args.busy}\n")
    with ExitStack() as stack:
        if args.busy:
            beside = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(beside.kill)
        measure(args, lambda side: environments.get(side, plain))


def measure(args, environment_of):
    print("| batch | side | pairs/s (median) | least | most | over peer |")
    print("|---|---|---|---|---|---|")
    for batch in args.batch:
        rates = {side: [] for side in SIDES}
        for _ in range(args.rounds):
            for side in SIDES:
                command = [sys.executable, __file__, "--side", side, "--batch", str(batch)]
                command += ["--steps", str(args.steps)]
                given = environment_of(side)
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, env=given
                )
                found = [line for line in done.stdout.splitlines() if line.startswith("RATE ")]
                if not found:
                    sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                rates[side].append(float(found[-1].split()[1]))
        base = statistics.median(rates["peer"])
        for side, seen in rates.items():
            middle = statistics.median(seen)
            print(
                f"| {batch} | {side} | {middle:.1f} | {min(seen):.1f} | {max(seen):.1f} "
                f"| {middle / base:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
