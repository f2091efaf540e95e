"""Whole training jobs on one GPU, as a user starts them: ZeRO 0 to 3, a killed one, its registry.

Models with random weights and pairs of random words are made first: BERT base with all weights, and
NV-Embed with LoRA on a Mistral of 1.1B parameters. Two texts belong together that share words of
their own among words that all texts have, which the model can learn to pass over.

A job in float32 for each ZeRO stage must come to the same losses and held-out scores, of the
decoder with fewer layers. A job with all settings as they come (bfloat16, graphs that fit) is
killed after a checkpoint, goes on, and must meet the losses that it had logged before. Then the
loss must have fallen, the held-out score have risen, and the registered model be loaded and encode
as the exported folder does.

All jobs are scripts of `jobs/` in processes of their own, by default on Ray: Ray Data prepares,
Ray Train starts the worker with NCCL, DeepSpeed trains, mteb scores, MLflow registers. Those in
float32 may run at once (`--at-once`); what fails there is done again alone. Seconds of a step then
say little; those of the whole job are of a machine to itself.
Run: python -m benchmarks.gpu.whole_job [--toy] [--models bert nvembed] [--stages 0 1 2 3]
     [--at-once 4] [--runtime ray] [--limit 240] [--folder DIR]
"""

import json
import os
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu import made_up, predictions
from benchmarks.gpu.job_process import (
    ENDING,
    Case,
    Job,
    MemoryWatch,
    Task,
    done_at_once,
    say,
)
from benchmarks.gpu.measuring import (
    Table,
    arguments,
    check,
    device_of,
    gpu_name,
    machine_line,
    mixed,
)

MISTRAL_1B: Mapping[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
"""TinyLlama's sizes: 1.1B parameters."""

COMMON = 64
"""Words that all texts have, the first of the vocabulary."""
OWN = 4
"""Words of its own that a query has, and its document too."""

STAGE = "finetune"
WARMUP = 3
"""First steps, whose time does not count."""

SAME_LOSS = 5e-3
"""Difference of losses in float32 after a few steps, of which sums in another order are the cause:
AdamW makes steps of one size from the smallest gradients."""
SAME_LOSS_BF16 = 5e-2
SAME_SCORE = 0.02


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows and steps."""

    rows: int
    compared_steps: int
    steps: int
    checkpoint: int
    compared_tokens: int
    """Tokens of a pass in the jobs that are compared, so that a step has several."""


def cases(toy: bool) -> dict[str, Case]:
    """Cases by their names on the command line."""
    encoder = made_up.TOY_ENCODER if toy else made_up.published_shape(made_up.BERT_BASE)
    decoder = made_up.TOY_DECODER if toy else MISTRAL_1B
    lengths = {"model.query_max_length": 64, "model.document_max_length": 256}
    nvembed = {
        **lengths,
        "model.kind": "nvembed",
        "model.pooling.num_latents": 16 if toy else 512,
        "model.lora.dropout": 0.0,
    }
    what = "toy " if toy else ""
    longest = 24 if toy else 200
    return {
        "bert": Case(
            *(f"{what}BERT base, all weights", "train_biencoder", encoder, lengths),
            *(1e-3 if toy else 1e-4, None, 16 if toy else 256, longest),
        ),
        "nvembed": Case(
            *(f"{what}NV-Embed, LoRA 16", "train_nvembed", decoder, nvembed),
            *(1e-3 if toy else 5e-4, 1 if toy else 4, 16 if toy else 64, longest),
        ),
    }


def sizes_of(toy: bool) -> Sizes:
    if toy:
        return Sizes(240, 6, 150, 20, 256)
    return Sizes(4000, 12, 80, 20, 8192)


def write_pairs(path: Path, rows: int, vocabulary: int, longest: int) -> list[str]:
    """A file of pairs; some of their documents come back."""
    draw = np.random.default_rng(0)
    own_words = np.arange(COMMON, vocabulary - len(made_up.SPECIAL))
    documents = []
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            own = draw.choice(own_words, OWN, replace=False)
            query = np.concatenate([own, draw.integers(0, COMMON, 2 * OWN)])
            more = draw.integers(0, COMMON, int(draw.integers(longest // 8, longest - OWN)))
            document = draw.permutation(np.concatenate([own, more]))
            row = {"query": _text(draw.permutation(query)), "positive": _text(document)}
            documents.append(row["positive"])
            file.write(json.dumps(row) + "\n")
    return documents[:64]


def _text(words: np.ndarray) -> str:
    return " ".join(f"w{word}" for word in words)


def tasks_of(
    key: str, case: Case, folder: Path, sizes: Sizes, device: torch.device, options: Any
) -> tuple[list[Task], Task]:
    """Jobs in float32 by ZeRO stage, and the whole one."""
    common = {
        **case.settings,
        "data.datasets.pairs.source.path": folder / f"{key}.jsonl",
        "model.backbone.path": folder / key,
        "evaluation.guard": None,
        "evaluation.benchmarks": [],
        f"stages.{STAGE}.batch.global_pairs": case.pairs,
        f"stages.{STAGE}.optimizer.learning_rate": case.rate,
        "placement.use_gpu": device.type == "cuda",
        "placement.runtime": options.runtime,
    }
    compared = {
        **common,
        "model.backbone.dtype": "float32",
        f"stages.{STAGE}.steps": sizes.compared_steps,
        "evaluation.before_training": False,
        "evaluation.baselines": "[]",
        # Several passes a step; and jobs beside each other must not measure the same free memory.
        "placement.grad_cache": True,
        "placement.gradient_checkpointing": False,
        "placement.micro_batch_tokens": sizes.compared_tokens,
        # Or each job would take all cores for its data.
        "placement.step_processes": 1 if options.runtime == "ray" and not options.toy else 0,
    }
    if case.compared_layers is not None:
        compared["model.backbone.num_layers"] = case.compared_layers
    of_stages = [
        Task(
            *(f"{key}-zero-{zero}", f"{case.name}, float32, ZeRO {zero}", case),
            {**compared, "placement.zero_stage": zero},
            folder / f"{key}-zero-{zero}",
            options.limit,
        )
        for zero in options.stages
    ]
    whole = Task(
        *(f"{key}-whole", f"{case.name}, as it comes", case),
        {
            **common,
            f"stages.{STAGE}.steps": sizes.steps,
            f"stages.{STAGE}.checkpoint_every_steps": sizes.checkpoint,
        },
        folder / f"{key}-whole",
        options.limit,
    )
    return of_stages, whole


def killed_after_a_checkpoint(task: Task) -> dict[int, float]:
    """Start the job, kill it when a checkpoint counts and a step followed; its losses until then.

    Raises:
        SystemExit: it failed, or ended before.
    """
    listed = task.run / STAGE / "train" / "checkpoint_manager_snapshot.json"
    job = Job(replace(task, told=f"{task.told}, to be killed"))

    def is_time() -> bool:
        # Read before the steps, so that those are of later.
        counted = [s for s in (task.run / STAGE / "train").glob("step-*") if listed.exists()]
        steps = [int(s.name.removeprefix("step-")) for s in counted if s.name in _read(listed)]
        return bool(steps) and len(task.steps()) >= min(steps) + 2

    job.wait(is_time)
    if job.process.poll() is not None:
        job.tell_end(job.process.poll() == 0)
        raise SystemExit(f"{job.task.told}: it ended before a checkpoint was seen")
    job.kill()
    losses = task.losses()
    say(f"{job.task.told}: killed after step {max(losses)}, {job.seconds:.0f} s")
    return losses


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def check_stages(tasks: Sequence[Task]) -> None:
    """Losses and scores of all ZeRO stages are the same, and the loss falls."""
    first, *others = tasks
    losses, score = first.losses(), _trained(first)
    for other in others:
        found = other.losses()
        off = max(abs(found[step] - loss) for step, loss in losses.items())
        limit = SAME_LOSS * max(1.0, *losses.values())
        check(off < limit, f"{other.told}: losses are those of {first.name} to {off:.1e}")
        off = abs(_trained(other) - score)
        check(
            off < SAME_SCORE, f"{other.told}: held-out score is that of {first.name} to {off:.4f}"
        )


def _trained(task: Task) -> float:
    (score,) = [score for name, score in task.scores().items() if name.startswith("stage ")]
    return score


def check_whole(task: Task, before: dict[int, float], log: str, start: int) -> None:
    """The resumed job went on, met what it had logged before, and learnt."""
    told = log[start:].partition("resumes after step ")[2]
    step = int(told.split()[0]) if told else 0
    check(step > 0, f"{task.told}: it went on after step {step}")
    after = task.losses()
    again = [number for number in before if number > step]
    limit = SAME_LOSS_BF16 * max(1.0, *before.values())
    off = max((abs(after[number] - before[number]) for number in again), default=0.0)
    check(
        off < limit, f"{task.told}: {len(again)} steps done twice have the same loss to {off:.1e}"
    )
    curve = [after[number] for number in sorted(after)]
    check(sorted(after) == list(range(1, len(after) + 1)), f"{task.told}: its log has every step")
    tenth = max(1, len(curve) // 10)
    early, late = statistics.mean(curve[:tenth]), statistics.mean(curve[-tenth:])
    check(late < early, f"{task.told}: the loss fell from {early:.3f} to {late:.3f}")
    scores = task.scores()
    trained, untrained = _trained(task), scores["untrained"]
    check(trained > untrained, f"{task.told}: held-out nDCG@10 {untrained:.3f} → {trained:.3f}")


def check_registered(task: Task, documents: list[str], device: torch.device) -> None:
    """The version in MLflow's registry loads, and encodes as the exported folder does."""
    import mlflow

    from rayembed.models.loading.load import load_model
    from rayembed.models.passes.encoding import encode

    began = time.monotonic()
    mlflow.set_tracking_uri(f"sqlite:///{task.outputs}/mlflow.db")
    registered = mlflow.pyfunc.load_model(f"models:/{task.name}@candidate")
    answer = registered.predict({"input": documents, "role": "document"})
    found = np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)
    model = load_model(task.run / "models" / STAGE, device=device)
    expected = encode(model, documents, role="document")
    least = float((found * expected).sum(1).min())
    taken = time.monotonic() - began
    check(least > 0.98, f"{task.told}: registered and exported: cosine {least:.4f}, {taken:.0f} s")


def row_of(
    task: Task, dtype: str, memory: str, at_once: int, seconds: float, device: torch.device
) -> list[object]:
    steps = task.steps()
    timed = steps[WARMUP:] or steps
    step = statistics.median(s["seconds"] for s in timed)
    tokens = statistics.mean(s["tokens"] for s in timed)
    zero = str(task.settings.get("placement.zero_stage", 2))
    expected = predicted_step(task, tokens, device) if dtype == "auto" else None
    times = [f"{step:.3f}", f"{tokens / step:,.0f}"]
    further = ["–", "–"]
    if expected is not None:
        further = [f"{expected.seconds:.3f}", f"{expected.tokens_per_second:,.0f}"]
    return [
        *(task.case.name, dtype, zero, len(steps), *mixed(times, further), memory),
        *(f"{steps[-1]['loss']:.4f}", f"{_trained(task):.3f}", at_once, f"{seconds:.0f}"),
    ]


def predicted_step(
    task: Task, tokens: float, device: torch.device
) -> predictions.Prediction | None:
    """A step in one pass, as four processes tokenise; None for a model with adapters."""
    from rayembed.models.biencoder.config import BiEncoderConfig

    if "model.kind" in task.settings:
        return None
    path = str(task.settings["model.backbone.path"])
    settings = BiEncoderConfig(backbone={"path": path, "dtype": "bfloat16"})
    gpu = predictions.gpu_of(gpu_name(device))
    texts = 2 * task.case.pairs
    return predictions.Model(settings, predictions.MACHINES[gpu]).training_step(
        [[round(tokens / texts)] * texts],
        optimiser_bytes=predictions.JOB_OPTIMISER_BYTES,
        readers=predictions.READERS * predictions.READER_TOKENS,
        between=predictions.BETWEEN_STEPS_SECONDS,
    )


def measure(
    table: Table,
    key: str,
    folder: Path,
    device: torch.device,
    options: Any,
) -> None:
    """Run and check the jobs of one model; each adds its row of the table.

    Raises:
        SystemExit: a job failed, or is wrong.
    """
    case, sizes = cases(options.toy)[key], sizes_of(options.toy or device.type == "cpu")
    made_up.model_folder(folder / key, case.shape, device, "float32" if options.toy else "bfloat16")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    vocabulary = int(case.shape["vocab_size"])
    documents = write_pairs(folder / f"{key}.jsonl", sizes.rows, vocabulary, case.longest)
    say(f"{case.name}: model and pairs are made")
    of_stages, whole = tasks_of(key, case, folder, sizes, device, options)
    at_once = min(options.at_once, len(of_stages))
    if of_stages:
        with MemoryWatch(device) as memory:
            taken = done_at_once(of_stages, at_once)
        for task in of_stages:
            table.add(row_of(task, "float32", memory.told, at_once, taken[task.name], device))
        check_stages(of_stages)
    if not options.only_stages:
        before = killed_after_a_checkpoint(whole)
        with MemoryWatch(device) as memory:
            job = Job(replace(whole, told=f"{whole.told}, again"))
            start = len(job.text())
            well = job.wait()
        job.tell_end(well)
        if not well:
            raise SystemExit(f"{whole.told}: the second start failed")
        table.add(row_of(whole, "auto", memory.told, 1, job.seconds, device))
        check_registered(whole, documents, device)
        check_whole(whole, before, job.text(), start)


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*cases(True)], default=[*cases(True)])
    parser.add_argument("--stages", nargs="*", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--at-once", type=int, default=1, help="jobs in float32 beside each other")
    parser.add_argument("--only-stages", action="store_true", help="only the jobs in float32")
    parser.add_argument("--runtime", choices=["ray", "local"], default="ray")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a job")
    parser.add_argument("--folder", type=Path, help="where models and outputs are written (20 GB)")
    options = parser.parse_args(given)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device = device_of(options.toy)
    print(machine_line(device), flush=True)
    heads = ["model", "number type", "ZeRO", "steps", "seconds a step"]
    heads += [f"predicted, {predictions.gpu_of(gpu_name(device))}", "tokens/s", "predicted"]
    heads += ["GB of the GPU, of all jobs", "last loss", "held-out nDCG@10", "jobs at once"]
    heads += ["seconds of the job"]
    title = f"Whole jobs, runtime {options.runtime}. {machine_line(device)}."
    table = Table(title, heads, options.record)
    wrong = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ENDING.set())
    with made_up.folder_of_models(options.folder) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        for key in options.models:
            try:
                measure(table, key, folder.resolve(), device, options)
            except SystemExit as problem:  # the next model has something to say all the same
                if ENDING.is_set():
                    raise
                say(str(problem))
                wrong.append(str(problem))
            table.print()
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
