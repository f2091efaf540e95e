"""A package from outside brings a cross-encoder as an architecture, with its loss and objective.

`tests/support/crossrank` is made visible as an installed package by its entry points; rayembed's
own code stays as it is.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import rayembed

pytestmark = pytest.mark.distributed

PLATFORM = Path(rayembed.__file__).parents[1]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
POINTS = """[rayembed.architectures]
pair_scorer = crossrank.config:CrossEncoderConfig

[rayembed.losses]
pair_cross_entropy = crossrank.config:PairCrossEntropy
"""

SCRIPT = """
import json, sys
from pathlib import Path

from rayembed.config.run import Run
from rayembed.config.settings import parse

folder, kind = Path(sys.argv[1]), sys.argv[2]
rank, workers = map(int, sys.argv[3:])
run = parse(Run, {
    "name": "ranker",
    "model": {
        "kind": "pair_scorer",
        "backbone": {"path": str(folder / "encoder"), "dtype": "float32"},
        "query_max_length": 40,
        "document_max_length": 40,
    },
    "data": {
        "root": str(folder),
        "datasets": [{"name": "d", "source": {
            "kind": "pairs", "path": "pairs.jsonl", "negatives": "negatives"}}],
    },
    "stages": [{
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 16, "num_negatives": 1, "in_batch_negatives": False},
        "loss": {"kind": kind},
        "optimizer": {"learning_rate": 0.003},
        "steps": 40,
    }],
    "placement": {
        "storage_path": str(folder / "out"), "micro_batch_tokens": 200, "workers": workers
    },
})

from tiny_models import save_encoder

from rayembed.errors import ConfigError
from rayembed.pipeline.checks.model import check_inputs

if rank == 0:
    save_encoder(folder / "encoder")
try:
    if workers == 1:
        check_inputs(run)
except ConfigError as error:
    print(error)
    sys.exit(2)

import torch

from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.plan.stream import prefetched
from rayembed.data.prepare import prepare
from rayembed.models.loading.load import load_model
from rayembed.training.checkpoints.export import export
from rayembed.training.job import StageJob
from rayembed.training.trainer import Callback

torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/meet-{kind}", rank=rank, world_size=workers
)
if rank == 0:
    plans = prepare(run, PipelineContext(str(folder / "data"), 0, root=str(folder)))
    (folder / "plans.json").write_text(json.dumps(plans))
torch.distributed.barrier()
plan = json.loads((folder / "plans.json").read_text())["s"]
job = StageJob(run, 0, plan, None, str(folder / "weights.safetensors"))
losses = []


class Losses(Callback):
    def on_step_end(self, record):
        losses.append(record["loss"])


job.trainer([Losses()], prefetched).fit()
torch.distributed.barrier()  # the first worker writes
assert job.is_done()
if rank == 0:
    from rayembed.training.checkpoints.weights import load_weights

    model = load_weights(run, job.weights).eval()
    rows = [json.loads(line) for line in (folder / "unseen.jsonl").read_text().splitlines()]
    won = 0
    for row in rows:
        texts = [(row["query"], row["positive"]), (row["query"], row["negatives"][0])]
        tokens = model.tokenizer.of_pairs(texts)
        with torch.no_grad():
            good, bad = model(model.tokenizer.collate(tokens)).tolist()
        won += good > bad
    export(run, job.weights, str(folder / "exported"))
    again = load_model(folder / "exported", dtype="float32")
    with torch.no_grad():
        batch = model.tokenizer.collate(tokens)
        torch.testing.assert_close(again(batch), model(batch))
    print(json.dumps({"first": losses[0], "last": losses[-1], "won": won / len(rows)}))
"""


@pytest.fixture
def package(tmp_path):
    """Where `crossrank` is installed, and pairs whose documents hold their query's word or not."""
    info = tmp_path / "site" / "crossrank-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: crossrank\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    generator = random.Random(0)
    words = ["good", "bad"]
    for name, count in (("pairs", 400), ("unseen", 60)):
        lines = []
        for number in range(count):
            # The relevant document is the one that is called good, whatever is asked.
            query = f"query {number} {generator.choice('abcdefgh')}"
            texts = [f"the {word} document {generator.randrange(10**6)}" for word in words]
            lines.append(
                f'{{"query": "{query}", "positive": "{texts[0]}", "negatives": ["{texts[1]}"]}}'
            )
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def train(folder, kind, num_workers, *, visible=True):
    """The workers' exit codes and what they printed."""
    (folder / "script.py").write_text(SCRIPT)
    paths = [str(PLATFORM), str(SUPPORT), *([str(folder / "site")] if visible else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": "0",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, folder / "script.py", folder, kind, str(rank), str(num_workers)],
            env={**environment, "RANK": str(rank), "WORLD_SIZE": str(num_workers)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_workers)
    ]
    printed = [worker.communicate(timeout=300)[0] for worker in workers]
    return [worker.returncode for worker in workers], printed


def test_a_cross_encoder_from_outside_trains_with_its_own_loss(package):
    codes, printed = train(package, "pair_cross_entropy", 2)
    assert codes == [0, 0], printed
    found = json.loads(printed[0].splitlines()[-1])
    assert found["last"] < 0.5 * found["first"], found
    assert found["won"] > 0.9, found


def test_a_loss_of_embeddings_is_refused_by_its_objective(package):
    codes, printed = train(package, "infonce", 1)
    assert codes == [2], printed
    assert "set it to pair_cross_entropy" in printed[0]


def test_without_the_package_neither_is_known(package):
    codes, printed = train(package, "pair_cross_entropy", 1, visible=False)
    assert codes == [1]
    assert "model.kind = 'pair_scorer': must be one of" in printed[0]
