"""What all benchmarks of this folder share: the machine's line, times, memory, tables."""

import argparse
import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch


def arguments(description: str) -> argparse.ArgumentParser:
    """Parser with what every script takes."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU in seconds")
    parser.add_argument("--rounds", type=int, default=None, help="of which the median counts")
    parser.add_argument(
        "--record", type=Path, help="Markdown file that each row is added to once it is measured"
    )
    return parser


def device_of(toy: bool) -> torch.device:
    """The GPU; the CPU at toy size or where there is none, which is said."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if toy:
        torch.set_num_threads(1)  # tiny products only wait for further threads
    if toy or not torch.cuda.is_available():
        if not toy:
            print("No GPU is seen: this runs on the CPU and says nothing about one.")
        return torch.device("cpu")
    return torch.device("cuda")


def gpu_name(device: torch.device) -> str:
    """Name of the GPU; empty on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def machine_line(device: torch.device) -> str:
    """Device, driver and versions, of which the numbers hold."""
    import transformers

    from rayembed.registry.provenance import cpu_summary

    if device.type == "cuda":
        what = f"{torch.cuda.get_device_name(device)}, driver {driver()}, CUDA {torch.version.cuda}"
    else:
        what = f"{cpu_summary()}, no GPU"
    return f"{what}, torch {torch.__version__}, transformers {transformers.__version__}"


def driver() -> str:
    """Version of NVIDIA's driver; `unknown` without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def seconds(work: Callable[[], object], device: torch.device, *, warmup: int, rounds: int) -> float:
    """Median seconds of a call, by CUDA's events on a GPU; after calls that do not count."""
    for _ in range(warmup):
        work()
    taken = []
    for _ in range(rounds):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            began.record()
            work()
            ended.record()
            torch.cuda.synchronize(device)
            taken.append(began.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def wall_seconds(
    work: Callable[[], object], device: torch.device, *, warmup: int, rounds: int
) -> float:
    """Median seconds of a call by the clock, all of its work on the device included."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    cpu = torch.device("cpu")
    return seconds(finished, cpu, warmup=warmup, rounds=rounds)


def product_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of square products in a number type: the most that layers may hope for."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    taken = seconds(lambda: left @ right, device, warmup=3, rounds=10)
    return 2 * size**3 / taken


def reset_peak(device: torch.device) -> None:
    """Begin to watch the memory anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> str:
    """Most gigabytes that tensors took on the GPU since `reset_peak`."""
    if device.type != "cuda":
        return "–"
    return f"{torch.cuda.max_memory_allocated(device) / 1e9:.1f}"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table in Markdown."""
    print(f"| {' | '.join(heads)} |")
    print(f"|---|{'---:|' * (len(heads) - 1)}")
    for row in rows:
        print_row(row)


def print_row(row: Sequence[object]) -> None:
    """Print a row of a table in Markdown."""
    print(f"| {' | '.join(map(str, row))} |", flush=True)


class Table:
    """A table in Markdown, printed when it ends and recorded row by row.

    A benchmark that is killed leaves the rows that it had measured.
    """

    def __init__(self, title: str, heads: Sequence[str], record: Path | None = None) -> None:
        self.title, self.heads, self.record = title, heads, record
        self.rows: list[Sequence[object]] = []

    def add(self, row: Sequence[object]) -> None:
        """Add a row; with `record` to that file too, the first one below the title and heads."""
        self.rows.append(row)
        if self.record is None:
            return
        with self.record.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            if len(self.rows) == 1:
                print(f"\n{self.title}\n")
                print_table(self.heads, [row])
            else:
                print_row(row)

    def print(self) -> None:
        """Print the title and all rows."""
        print(f"\n{self.title}\n")
        print_table(self.heads, self.rows)


def check(holds: bool, what: str) -> None:
    """Say that something is right; end the benchmark where it is not, before it times anything."""
    if not holds:
        raise SystemExit(f"wrong: {what}")
    print(f"checked: {what}")


def compare(name: str, vectors: np.ndarray, kept: Path, least: float, *, exact: bool) -> None:
    """Compare a side's unit vectors with those kept in a file; the first side's are put there.

    Args:
        least: cosine that is right.
        exact: whether those in the file are of float32.

    Raises:
        SystemExit: they differ.
    """
    if not kept.exists():
        check(bool(np.isfinite(vectors).all()), f"{name}: finite; others are compared with it")
        np.save(kept, vectors)
        return
    cosine = float((vectors * np.load(kept)).sum(1).min())
    what = "float32" if exact else "the side that ran first"
    check(cosine > least, f"{name}: cosine to {what} at least {cosine:.4f}")


def mixed(measured: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Each measured number, and behind it what was predicted."""
    return [cell for both in zip(measured, expected, strict=True) for cell in both]


def has_flash_attention() -> bool:
    """Whether transformers finds flash-attn, or what stands for it (`flash_shim/`)."""
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


def tokens_of(folder: Path, texts: Sequence[str]) -> int:
    """Tokens of texts, special ones included."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    return sum(map(len, tokenizer(list(texts))["input_ids"]))
