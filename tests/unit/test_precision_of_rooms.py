"""The number type in each room: decided for the machine that computes, once, and said."""

import logging
import pickle
import shutil
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import ray
import torch
import transformers
from tiny_models import save_cde_stages, save_cross_encoder, save_encoder

import rayembed
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.backbone import BackboneConfig
from rayembed.config.data_run import TeacherPlacement, data_of
from rayembed.config.evaluation import EvaluationPlacement, EvaluationRun, ModelUnderTest
from rayembed.config.mining import CrossEncoder, Teacher
from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.config.types import StoredVectors as SmallVectors
from rayembed.data.engine import on_ray as data_on_ray
from rayembed.data.engine.here import execute_here
from rayembed.data.mining.rescoring import load_cross_encoder
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.errors import ConfigError
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.pooled.embedding_store import EmbeddingBucket, TextUnit
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.run_scores import make_spec
from rayembed.evaluation.tables import ScoreKey
from rayembed.machine import hardware
from rayembed.machine.device import SeenGpus
from rayembed.machine.hardware import Precision
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.cde.config import CDEConfig
from rayembed.models.cde.model import CDE
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import corpus_context
from rayembed.models.sentence_module import as_sentence_transformer
from rayembed.pipeline.evaluate import evaluate as evaluation
from rayembed.pipeline.evaluate import run_scorer
from rayembed.pipeline.evaluate.run_scorer import RunScorer
from rayembed.pipeline.run.folders import RunFolders
from rayembed.pipeline.run.on_ray import OnRay
from rayembed.recipes.catalogue import get_recipe

RTX, T4 = ("NVIDIA GeForce RTX 3090", (8, 6)), ("Tesla T4", (7, 5))
EMULATED, WITH_UNITS = 1 / 30, 2.4

NARROW = Precision("float32", "this GPU (Tesla T4, 7.5) has no units for bfloat16")
WIDE = Precision("bfloat16", "this CPU has units for it (2.4 times float32)")


@pytest.fixture
def machine(monkeypatch, caplog):
    """Sets the CPU's speed in bfloat16, and the GPU that torch sees."""
    caplog.set_level(logging.INFO)
    hardware.say_once.cache_clear()

    def become(speed, gpu=None):
        monkeypatch.setattr(hardware, "bfloat16_speed", lambda: speed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(hardware, "_gpu", lambda device: gpu)

    yield become
    hardware.say_once.cache_clear()


@pytest.fixture
def saved(tmp_path):
    """Folder of a model of rayembed's own, saved in bfloat16."""
    backbone = BackboneConfig(path="unused", dtype="bfloat16")
    config = BiEncoderConfig(backbone=backbone, query_max_length=20, document_max_length=20)
    build_model(config, save_encoder(tmp_path / "b"), seed=1).eval().save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def plain(tmp_path):
    """Folder of an encoder in transformers' format, saved in bfloat16."""
    folder = save_encoder(tmp_path / "plain")
    transformers.AutoModel.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    return folder


def types_of(model):
    return {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize(
    ("speed", "gpu", "dtype", "device"),
    [
        (EMULATED, RTX, "bfloat16", ["cuda"]),
        (WITH_UNITS, T4, "float32", ["cuda"]),
        (EMULATED, None, "float32", []),
        (WITH_UNITS, None, "bfloat16", []),
    ],
)
def test_teachers_take_the_type_of_the_device_on_which_they_run(
    machine, caplog, speed, gpu, dtype, device
):
    machine(speed, gpu)
    assert TeacherLoader().settled(Teacher(teacher="a")).dtype == dtype
    assert [record.message for record in caplog.records] == [str(hardware.auto_precision())]
    (found,) = execute_here(lambda item, *device: list(device), [0], "gpu or machine")
    assert found == device


def test_a_teacher_in_a_named_type_that_is_emulated_is_warned_of(machine, caplog):
    machine(WITH_UNITS)
    asked = Teacher(teacher="a", dtype="bfloat16")
    assert TeacherLoader().settled(asked) == asked
    machine(EMULATED)
    assert TeacherLoader().settled(asked) == asked
    (record,) = caplog.records
    assert record.message.startswith("bfloat16 was asked for, but this CPU emulates")


def test_a_model_on_the_cpu_has_the_cpus_type_whatever_gpu_there_is(machine, caplog, saved):
    machine(EMULATED, RTX)
    assert types_of(rayembed.load(saved, device="cpu").model) == {torch.float32}
    assert types_of(load_model(saved)) == {torch.float32}
    assert types_of(as_sentence_transformer(saved, device="cpu")) == {torch.float32}
    told = "weights saved in bfloat16 are computed in float32: this CPU emulates bfloat16"
    assert [told in record.message for record in caplog.records] == [True]
    machine(WITH_UNITS, T4)
    assert types_of(load_model(saved)) == {torch.bfloat16}
    assert types_of(load_model(saved, device=torch.device("cpu"))) == {torch.bfloat16}


@pytest.mark.parametrize(("gpu", "dtype"), [(RTX, torch.bfloat16), (T4, torch.float32)])
def test_a_model_is_loaded_onto_the_gpu_in_the_gpus_type(machine, monkeypatch, saved, gpu, dtype):
    placed = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, d: placed.append(d) or model)
    machine(EMULATED if gpu is RTX else WITH_UNITS, gpu)
    for device in (None, "cuda:1"):
        assert types_of(rayembed.load(saved, device=device).model) == {dtype}
    assert placed == ["cuda", "cuda:1"]


def test_a_gpu_that_is_not_there_is_refused(machine, saved):
    machine(EMULATED)
    with pytest.raises(ConfigError, match=r"device='cuda:1', but torch sees no GPU"):
        rayembed.load(saved, device="cuda:1")
    assert rayembed.load(saved).model.device.type == "cpu"


@pytest.mark.parametrize(
    ("speed", "dtype"), [(EMULATED, torch.float32), (WITH_UNITS, torch.bfloat16)]
)
def test_rerankers_saved_in_bfloat16_are_widened_where_it_is_emulated(
    machine, monkeypatch, tmp_path, speed, dtype
):
    kind = transformers.BertForSequenceClassification
    folder = save_cross_encoder(tmp_path / str(dtype))
    kind.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    seen, forward = [], kind.forward

    def spy(model, *args, **named):
        seen.append(types_of(model))
        return forward(model, *args, **named)

    monkeypatch.setattr(kind, "forward", spy)
    machine(speed)
    asked = CrossEncoder(model=str(folder)), weights_fingerprint(folder)
    to = torch.nn.Module.to
    with patch.object(torch.nn.Module, "to", autospec=True, side_effect=to) as casts:
        score = load_cross_encoder(*asked)
    score([("a b", "c d")])
    assert seen == [{dtype}]
    angles = "of positions stay in float32"
    cast = {type(call.args[0]) for call in casts.call_args_list if torch.bfloat16 in call.args}
    assert cast == ({torch.nn.Linear} if dtype == torch.bfloat16 else set()), angles


def save_cde(folder):
    """Folder of a tiny CDE, saved in bfloat16."""
    settings = {
        "backbone": {"path": "given", "dtype": "bfloat16"},
        "encoder": {"path": "given"},
        "num_context": 3,
        "query_max_length": 32,
        "document_max_length": 32,
    }
    stages = save_cde_stages(folder / "stages")
    build_model(parse(CDEConfig, settings), stages, seed=5).eval().save(folder / "saved")
    return folder / "saved"


def test_a_named_type_that_is_emulated_is_warned_of(machine, caplog, plain):
    asked = ModelUnderTest(reference=str(plain), dtype="bfloat16")
    machine(WITH_UNITS)
    make_spec(asked)
    assert "asked for" not in caplog.text
    machine(EMULATED)
    assert make_spec(asked).settings == asked
    assert "bfloat16 was asked for, but this CPU emulates" in caplog.text


class Answers:
    """A spec whose model says how exact float32 products are when it is called."""

    similarity, stored = "cosine", SmallVectors()

    def __init__(self, dtype):
        self.conditions = {"dtype": dtype}
        self.seen = []

    def load(self, device):
        def embed(texts, encode_spec):
            self.seen.append(torch.get_float32_matmul_precision())
            return np.eye(len(texts), 4, dtype=np.float32)

        return embed


@pytest.mark.parametrize(
    ("dtype", "device", "products"),
    [("tf32", "cuda", "high"), ("tf32", "cpu", "highest"), ("float32", "cuda", "highest")],
)
def test_products_are_rounded_by_name_on_a_gpu_and_while_texts_are_embedded_alone(
    dtype, device, products
):
    spec = Answers(dtype)
    worker = EncodingWorker(spec, None, device)
    worker.embed(TextUnit(EmbeddingBucket(EncodeSpec("document"), 0, 1), ("a", "b")))
    assert spec.seen == [products]
    assert torch.get_float32_matmul_precision() == "highest", "a search after it is exact"


def test_scores_with_rounded_products_have_a_revision_of_their_own(machine, tmp_path):
    folder = str(save_cde(tmp_path / "cde"))
    specs = [
        make_spec(ModelUnderTest(reference=folder, dtype=dtype)) for dtype in ("tf32", "float32")
    ]
    rounded, exact = specs
    assert rounded.conditions["dtype"] == "tf32"
    assert rounded.fingerprint != exact.fingerprint
    assert rounded.meta.revision != exact.meta.revision
    texts = ["a b", "c"], EncodeSpec("document")
    np.testing.assert_array_equal(*(spec.load("cpu")(*texts) for spec in specs))


class Workers:
    """A runtime whose workers compute fast in one type."""

    def __init__(self, precision):
        self.precision_there, self.asked = precision, []

    def precision(self, placement):
        self.asked.append(placement)
        return self.precision_there

    def pool(self, workers):
        return None

    def gpus(self, placement):
        return SeenGpus(0, "there is no GPU")


def evaluated(monkeypatch, folder, runtime, **settings):
    """The model as the evaluation job hands it to its workers."""
    seen = []
    monkeypatch.setattr(evaluation, "task_factories", lambda run: [])
    monkeypatch.setattr(evaluation, "runtime_of", lambda placement: runtime)
    monkeypatch.setattr(evaluation, "score", lambda model, *_, **__: seen.append(model))
    run = EvaluationRun(
        model=ModelUnderTest(**settings),
        tasks=("STSBenchmark",),
        placement=EvaluationPlacement(storage_path=str(folder)),
    )
    evaluation.evaluate(run)
    return seen[0]


@pytest.mark.parametrize(("here", "there"), [(WITH_UNITS, NARROW), (EMULATED, WIDE)])
def test_evaluation_takes_the_type_of_its_workers(
    machine, monkeypatch, caplog, tmp_path, plain, here, there
):
    machine(here)
    runtime = Workers(there)
    spec = evaluated(monkeypatch, tmp_path, runtime, reference=str(plain))
    assert spec.settings.dtype == there.dtype
    assert len(runtime.asked) == 1
    # A worker keeps to it, and takes nothing for asked that was decided for it.
    caplog.clear()
    pickle.loads(pickle.dumps(spec)).load("cpu")
    assert "asked for" not in caplog.text


def test_workers_are_not_asked_where_nothing_depends_on_them(monkeypatch, tmp_path, plain):
    runtime = Workers(NARROW)
    for dtype in ("float32", "saved"):
        evaluated(monkeypatch, tmp_path, runtime, reference=str(plain), dtype=dtype)
    evaluated(monkeypatch, tmp_path, runtime, reference="bm25")
    assert not runtime.asked


@pytest.mark.parametrize(("here", "there"), [(WITH_UNITS, NARROW), (EMULATED, WIDE)])
def test_a_runs_models_are_scored_in_the_type_of_its_workers(
    machine, monkeypatch, tmp_path, plain, here, there
):
    machine(here)
    seen, runtime = [], Workers(there)

    def score(model, *_, **__):
        seen.append(model.settings.dtype)
        return SimpleNamespace(failed=[], further={})

    monkeypatch.setattr(run_scorer, "score", score)
    monkeypatch.setattr(run_scorer, "task_factories", lambda scores: [])
    run = override(get_recipe("biencoder"), ["model.backbone.dtype=bfloat16"])
    folders = RunFolders(StoredFolder(str(tmp_path / "run"), tmp_path / "run"))
    scorer = RunScorer(run, folders, runtime)
    for name in ("a", "b"):
        shutil.copytree(plain, folders.model(name))
        scorer.score(ScoreKey(name))
    in_float32 = override(run, ["model.backbone.dtype=float32"])
    RunScorer(in_float32, folders, runtime).score(ScoreKey(baseline=str(plain)))
    assert seen == [there.dtype] * 3
    assert len(runtime.asked) == 2


def test_a_named_cluster_is_joined_and_asked(machine, monkeypatch):
    done = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("rayembed.training.on_ray.node_precision", lambda *asked: asked)
    runtime = OnRay()
    runtime.start = lambda: done.append("joined")
    machine(EMULATED)  # of the driver
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert runtime.precision(EvaluationPlacement()).dtype == "float32"
    assert not done, "a cluster that would be started is this machine"
    monkeypatch.setenv("RAY_ADDRESS", "ray://there")
    found = runtime.precision(EvaluationPlacement(use_gpu=True, cpus_per_worker=2))
    assert found == ("cuda", {"CPU": 2.0, "GPU": 1.0})
    assert done == ["joined"]


RUN = SimpleNamespace(placement=TeacherPlacement(), seed=0, data=SimpleNamespace(root=""))


class Cluster:
    """Ray's calls for a task that answers, or that finds no node."""

    exceptions = ray.exceptions

    def __init__(self, gpus, answer):
        self.gpus, self.answer, self.asked, self.cancelled = gpus, answer, [], []

    def cluster_resources(self):
        return {"GPU": self.gpus}

    def remote(self, **resources):
        def ask(device):
            self.asked.append((device, resources))
            return device

        return lambda function: SimpleNamespace(remote=ask)

    def get(self, found, timeout):
        assert timeout > 0
        if self.answer is None:
            raise ray.exceptions.GetTimeoutError
        return self.answer

    def cancel(self, found):
        self.cancelled.append(found)


@pytest.mark.parametrize(
    ("gpus", "asked"),
    [
        (0, ("cpu", {"num_cpus": 1, "num_gpus": 0})),
        (2, ("cuda", {"num_cpus": 0, "num_gpus": 0.01})),
    ],
)
def test_teachers_nodes_are_asked_in_which_they_have_room(monkeypatch, gpus, asked):
    cluster = Cluster(gpus, NARROW)
    monkeypatch.setattr(data_on_ray, "ray", cluster)
    loader = data_on_ray.ray_pipeline_context(RUN).teacher_loader
    teachers = [Teacher(teacher="a"), Teacher(teacher="b"), Teacher(teacher="c", dtype="bfloat16")]
    found = [loader.settled(teacher).dtype for teacher in teachers]
    assert found == ["float32", "float32", "bfloat16"]
    assert cluster.asked == [asked], "it is asked once"


def test_without_gpus_data_is_prepared_on_the_clusters_cpus(monkeypatch):
    asked, cluster = [], Cluster(2, NARROW)
    cluster.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}}]
    monkeypatch.setattr(data_on_ray, "ray", cluster)
    monkeypatch.setattr(data_on_ray, "watching", lambda *_: nullcontext())
    monkeypatch.setattr(data_on_ray, "_results", lambda _: [])
    monkeypatch.setattr(data_on_ray, "_execution", lambda *given: asked.append(given[3:]))
    run = get_recipe("biencoder")
    for use_gpu, processes, device in ((True, 2, "cuda"), (False, 1, "cpu")):
        placement = run.placement.model_copy(update={"use_gpu": use_gpu})
        context = data_on_ray.ray_pipeline_context(
            data_of(run.model_copy(update={"placement": placement}))
        )
        assert not list(context.execute(None, [1, 2, 3], "gpu or machine"))
        assert asked.pop() == (processes, use_gpu)
        context.teacher_loader.settled(Teacher(teacher="a"))
        assert cluster.asked.pop()[0] == device
    with pytest.raises(ConfigError, match="use_gpu=false keeps them on CPUs"):
        parse(TeacherPlacement, {"gpus": 2, "use_gpu": False})


def test_a_cluster_without_a_free_node_is_not_waited_for_without_end(machine, monkeypatch, caplog):
    machine(EMULATED)
    cluster = Cluster(0, None)
    monkeypatch.setattr(data_on_ray, "ray", cluster)
    loader = data_on_ray.ray_pipeline_context(RUN).teacher_loader
    assert loader.settled(Teacher(teacher="a")).dtype == "float32"
    assert cluster.cancelled == ["cpu"]
    assert "no node had the resources {'CPU': 1} free within 60 s" in caplog.text


def test_a_corpus_is_embedded_in_what_is_fast(machine, monkeypatch, tmp_path):
    folder = save_cde(tmp_path)
    seen, embed = [], CDE.embed_context

    def spy(model, batch):
        seen.append(types_of(model))
        return embed(model, batch)

    monkeypatch.setattr(CDE, "embed_context", spy)
    machine(EMULATED)
    texts = ["one", "two words", "three more words", "four", "five"]
    corpus_context(load_model(folder, device="cpu"), texts)
    assert set.union(*seen) == {torch.float32}
