"""The unmodified tasks of mteb, read from a hub on loopback by the normal online code."""

import os
import subprocess
import sys
from functools import cache

import mteb
import pytest
from mteb_hub import mteb_hub
from plain_scores import largest_difference, result_of
from plain_spec_model import PlainSpecModel
from word_encoder import WordEncoder
from word_model import WordSpec

from rayembed.evaluation.benchmarks import ENGLISH_V1, MtebTask, benchmark_tasks
from rayembed.evaluation.plan import joined, pieces
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.model import PooledModel
from rayembed.evaluation.pooled.pool import OneWorker

ENGLISH = benchmark_tasks(ENGLISH_V1)
MIRACL = MtebTask("MIRACLRetrievalHardNegatives.v2", subsets=("de", "en"))
OTHERS = (*(task for task in benchmark_tasks("NanoBEIR") if "SciFact" in task.name), MIRACL)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The task .* is superseded"),
    pytest.mark.filterwarnings("ignore:The used Evaluator is deprecated"),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub with the repositories of all these tasks, which this process reads."""
    tasks = [task.load() for task in (*ENGLISH, *OTHERS)]
    with mteb_hub(tasks, tmp_path_factory.mktemp("hub")) as running:
        yield running


@cache
def plain(factory: MtebTask) -> mteb.TaskResult:
    """What mteb's own code finds."""
    return result_of(PlainSpecModel(WordSpec()), factory.load())


@cache
def pooled(factory: MtebTask) -> mteb.TaskResult:
    """What mteb finds for the same model behind a pool of workers."""
    spec = WordSpec()
    return result_of(
        PooledModel(spec, OneWorker(EncodingWorker(spec, None, "cpu"))), factory.load()
    )


def test_the_benchmark_is_that_of_the_papers():
    assert len({task.name for task in ENGLISH}) == 56


@pytest.mark.parametrize("factory", [*ENGLISH, *OTHERS], ids=lambda task: task.name)
def test_a_task_runs_end_to_end(hub, factory):
    result = result_of(WordEncoder(), factory.load())
    assert result.task_name == factory.name
    # texts of a topic share words, so that an encoder of words does better than chance
    assert result.get_score() > 0.3
    expected = set(factory.subsets or ["default"])
    for scores in result.scores.values():
        assert {score["hf_subset"] for score in scores} == expected


@pytest.mark.parametrize("factory", [*ENGLISH, *OTHERS], ids=lambda task: task.name)
def test_a_pool_of_workers_gives_the_scores_of_plain_mteb(hub, factory):
    parts = pieces(factory)
    made = joined(factory, [pooled(p) for p in parts]) if len(parts) > 1 else pooled(factory)
    assert largest_difference(plain(factory).scores, made.scores) < 1e-6


@pytest.mark.parametrize(
    "factory", [MIRACL, MtebTask("CQADupstackRetrieval")], ids=lambda t: t.name
)
def test_pieces_joined_give_what_the_whole_task_gives(hub, factory):
    parts = pieces(factory)
    assert len(parts) > 1
    results = [plain(piece) for piece in parts]
    assert len({result.get_score() for result in results}) > 1
    whole = plain(factory)
    for order in (results, results[::-1]):
        made = joined(factory, order)
        assert made.scores == whole.scores
        assert made.task_name == whole.task_name
        assert made.dataset_revision == whole.dataset_revision
        assert made.evaluation_time == pytest.approx(sum(r.evaluation_time for r in results))


def test_other_processes_read_the_hub_too(hub):
    code = (
        "import mteb; task = mteb.get_task('STS12'); task.load_data(); "
        "print(task.dataset['test'].num_rows)"
    )
    before = len(hub.asked)
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["24"]
    assert any("sts12" in path for path in hub.asked[before:])
