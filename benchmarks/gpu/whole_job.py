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

import contextlib
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from benchmarks.gpu import made_up
from benchmarks.gpu.measuring import arguments, check, device_of, machine_line, print_table

ROOT = Path(__file__).resolve().parents[2]
BEGAN = time.monotonic()
ENDING = threading.Event()
"""Set by a signal: whoever waits for a job kills it."""

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
class Case:
    """A model and the settings of its jobs."""

    name: str
    job: str
    shape: Mapping[str, Any]
    settings: Mapping[str, Any]
    rate: float
    compared_layers: int | None
    """Layers of the jobs that are compared; None: all."""
    pairs: int
    """Of a step."""
    longest: int
    """Words of a document."""


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
            *(1e-3 if toy else 1e-4, None, 16 if toy else 128, longest),
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


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", flush=True)


@dataclass(frozen=True)
class Task:
    """One job: its script, its settings, and where its files lie."""

    name: str
    told: str
    case: Case
    settings: Mapping[str, Any]
    outputs: Path
    limit: float

    @property
    def run(self) -> Path:
        return self.outputs / "runs" / self.name

    @property
    def command(self) -> list[str]:
        script = str(ROOT / "jobs" / f"{self.case.job}.py")
        given = {**self.settings, "placement.storage_path": self.outputs}
        sets = [word for k, v in given.items() for word in ("--set", f"{k}={_value(v)}")]
        return [sys.executable, script, "--recipe", "biencoder", "--name", self.name, *sets]

    def steps(self) -> list[dict[str, Any]]:
        """What the run's log says of each step."""
        log = self.run / "metrics.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines(True) if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        return {int(step["step"]): float(step["loss"]) for step in self.steps()}

    def scores(self) -> dict[str, float]:
        """Model → held-out nDCG@10."""
        with (self.run / "scores.csv").open(encoding="utf-8") as file:
            _, *rows = csv.reader(file)
        return {name: float(score) for name, score, *_ in rows}


def _value(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


class Job:
    """A job as a process that leads a session of its own."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.log = task.outputs.parent / f"{task.outputs.name}.log"
        self.began = time.monotonic()
        self.ended: float | None = None
        paths = [str(ROOT / "platform"), os.environ.get("PYTHONPATH", "")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                task.command,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONUNBUFFERED": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        say(f"{task.told}: started")

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End the job and all that it started, without a warning."""
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for child in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(tree, timeout=10)
        self.process.wait()

    def wait(self, done: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the job ends or something else has happened; whether it ended well.

        One that outlasts its limit is killed.
        """
        try:
            while self.process.poll() is None and not done():
                if ENDING.is_set():
                    raise SystemExit("interrupted")
                if self.seconds > self.task.limit:
                    self.kill()
                    say(f"{self.task.told}: killed after {self.seconds:.0f} s, its limit")
                    return False
                time.sleep(0.02)
        except BaseException:
            self.kill()
            raise
        self.ended = time.monotonic()
        return self.process.poll() == 0

    def tell_end(self, well: bool) -> None:
        if well:
            say(f"{self.task.told}: done in {self.seconds:.0f} s")
            return
        say(f"{self.task.told}: FAILED, exit code {self.process.poll()}; its log ends:")
        print(self.text()[-4000:], flush=True)


class MemoryWatch:
    """Most memory of the GPU that was taken while the block ran, by all processes."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._end = threading.Event()
        self.most = 0.0

    def __enter__(self) -> "MemoryWatch":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while self._on and not self._end.wait(0.5):
            try:
                told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
                self.most = max(self.most, int(told) * 2**20 / 1e9)
            except (OSError, ValueError, subprocess.CalledProcessError):
                return

    @property
    def told(self) -> str:
        return f"{self.most:.1f}" if self.most else "–"


def done_alone(task: Task) -> Job | None:
    """The job after its end; None if it failed."""
    job = Job(task)
    well = job.wait()
    job.tell_end(well)
    return job if well else None


def done_at_once(tasks: Sequence[Task], at_once: int) -> dict[str, float]:
    """Name → seconds of each job. Those that fail beside others are done again alone.

    Raises:
        SystemExit: one fails alone too.
    """
    taken = {}
    with ThreadPoolExecutor(at_once) as pool:
        ended = list(pool.map(done_alone, tasks))
    for task, first in zip(tasks, ended, strict=True):
        job = first or (done_alone(task) if at_once > 1 else None)
        if job is None:
            raise SystemExit(f"{task.told} failed")
        taken[task.name] = job.seconds
    return taken


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
    told = log[start:].partition("goes on after step ")[2]
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

    from rayembed.models.encoding import encode
    from rayembed.models.load import load_model

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


def row_of(task: Task, dtype: str, memory: str, at_once: int, seconds: float) -> list[object]:
    steps = task.steps()
    timed = steps[WARMUP:] or steps
    step = statistics.median(s["seconds"] for s in timed)
    tokens = statistics.mean(s["tokens"] for s in timed)
    zero = str(task.settings.get("placement.zero_stage", 2))
    return [
        *(task.case.name, dtype, zero, len(steps), f"{step:.3f}", f"{tokens / step:,.0f}", memory),
        *(f"{steps[-1]['loss']:.4f}", f"{_trained(task):.3f}", at_once, f"{seconds:.0f}"),
    ]


def measure(
    rows: list[list[object]],
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
            rows.append(row_of(task, "float32", memory.told, at_once, taken[task.name]))
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
        rows.append(row_of(whole, "auto", memory.told, 1, job.seconds))
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
    heads = [
        "model",
        "number type",
        "ZeRO",
        "steps",
        "seconds a step",
        "tokens/s",
        "GB of the GPU, of all jobs",
    ]
    heads += ["last loss", "held-out nDCG@10", "jobs at once", "seconds of the job"]
    rows: list[list[object]] = []
    wrong = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ENDING.set())
    with made_up.folder_of_models(options.folder) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        for key in options.models:
            try:
                measure(rows, key, folder.resolve(), device, options)
            except SystemExit as problem:  # the next model has something to say all the same
                if ENDING.is_set():
                    raise
                say(str(problem))
                wrong.append(str(problem))
            print_table(heads, rows)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
