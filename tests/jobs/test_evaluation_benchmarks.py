"""The benchmarks of evaluations at toy size: their rows, their checks, what they count."""

import os
import re
import sys
from pathlib import Path

import prepared
import psutil
import pytest
from forked_workers import script
from parts import FLATS
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tiny_models import save_encoder

from evaluation_small import measured, table
from processes import cpu_of_all

pytestmark = pytest.mark.job

ROOT = Path(__file__).resolve().parents[2]


def printed(command):
    """What a benchmark prints."""
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", str(ROOT / "platform"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = prepared.run(command, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def rows(text):
    """First cell of each row → the others."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells}


KINDS = [((), "read and check the set")]
if "air_bench" in FLATS:
    KINDS.append((("--air-bench",), "read from the hub"))


@pytest.mark.parametrize(("arguments", "read"), KINDS)
def test_a_large_retrieval_is_read_scored_and_compared_with_brute_force(tmp_path, arguments, read):
    place = str(ROOT / "benchmarks" / "evaluation_scale.py")
    sizes = ("--documents", "3000", "--queries", "40", "--sample", "30")
    text = printed([sys.executable, place, *sizes, *arguments, "--folder", str(tmp_path)])
    for step in (read, "score, 1 × 2, float32", "brute force, 30 queries"):
        _, _, texts_a_second, *_ = rows(text)[step]
        assert float(texts_a_second.replace(",", "")) > 0
    number = r"(0\.\d{6})"
    found = re.search(rf"nDCG@10 {number}; of .* queries {number}, by brute force {number}; ", text)
    whole, ours, wanted = map(float, found.groups())
    assert 0.3 < whole < 1
    assert ours == wanted
    assert text.endswith("; 0 of them differ by more than 1e-5\n")


@pytest.mark.ray
def test_tasks_of_mteb_are_scored_by_both_sides(tmp_path):
    transformer = Transformer(str(save_encoder(tmp_path / "encoder")))
    made = SentenceTransformer(modules=[transformer, Pooling(32, "mean"), Normalize()])
    made.save(str(model := tmp_path / "tiny"))
    tasks = ("STS12", "NFCorpus", "Banking77Classification")
    place = str(ROOT / "benchmarks" / "evaluation_mteb.py")
    text = printed(script(place, "--times", "1", "--model", str(model), "--tasks", *tasks))
    found = rows(text)
    sides = ["mteb + sentence-transformers", "rayembed, without Ray, 1 × 2 threads"]
    sides += [f"rayembed on Ray, {shape} thread(s)" for shape in ("1 × 2", "2 × 1")]
    for side in sides:
        wall, _, cpu, _, apart = found[side]
        assert float(wall.replace(",", "")) > 0
        assert float(cpu.replace(",", "")) > 0
        assert float(apart.split()[0]) < 1e-5
    assert found[sides[0]][1] == found[sides[0]][3] == "1.00"
    # Of NFCorpus 30 documents and 7 queries, of STS12 24 pairs
    texts = int(re.search(r"([\d,]+) texts by mteb", text)[1].replace(",", ""))
    assert texts > 37 + 48 + 32


@pytest.mark.slow("two jobs that import all; their parts stand in the next test")
def test_a_small_evaluation_is_counted_process_by_process():
    text = printed([sys.executable, str(ROOT / "benchmarks" / "evaluation_small.py")])
    one, two = (rows(part) for part in re.split(r"^\d worker", text, flags=re.MULTILINE)[1:])
    assert float(one["the job"][0]) > 1
    assert one.keys() == {"process", "---", "the job", "all"}
    assert two.keys() > {"the job", "ray::_run", "ray::Worker", "all"}
    assert float(two["all"][0]) > float(one["all"][0])


BURNS = "import time\nwhile time.process_time() < 1.0: pass\ntime.sleep(1.0)\n"
"""Uses a second, and stays for long enough to be looked at."""


def test_seconds_of_all_processes_below_are_counted():
    both = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURNS!r}])\n{BURNS}"
    process = psutil.Popen([sys.executable, "-c", both])
    with cpu_of_all(process) as used:
        process.wait()
    assert 1.9 < used.seconds < 3.5
    assert sorted(round(seconds) for seconds in used.by_process.values()) == [1, 1]
    child = psutil.Popen([sys.executable, "-c", BURNS])
    with cpu_of_all(without=(child.pid,)) as used:
        child.wait()
    assert used.seconds < 0.9


def test_processes_of_a_job_are_told_apart_and_small_ones_summed_up():
    seconds, used = measured([sys.executable, "-c", BURNS])
    assert seconds > 2
    (process,) = used.by_process
    assert rows(table(used)).keys() == {"process", "---", "Ray's own and idle ones, 1", "all"}
    used.names[process] = "python jobs/evaluate_model.py --model x"
    used.by_process |= {2: 30.0, 3: 0.2, 4: 4.0}
    used.names |= {2: "ray::Worker.do()", 3: "ray::_run", 4: "raylet --x"}
    found = rows(table(used))
    assert found.keys() == {
        "process",
        "---",
        "ray::Worker",
        "the job",
        "Ray's own and idle ones, 2",
        "all",
    }
    assert found["ray::Worker"] == ["30.0"]
    assert found["Ray's own and idle ones, 2"] == ["4.2"]
    with pytest.raises(SystemExit, match="ended with 3"):
        measured([sys.executable, "-c", "raise SystemExit(3)"])
