"""One model has the same scores on the same tasks, whoever takes them."""

import json
import random
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from run_scoring import tasks_of
from tiny_models import save_cde_stages, save_decoder, save_encoder
from word_articles import HELD_OUT, WORDS, run_over_words, write_word_articles

import rayembed
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.document import read_yaml
from rayembed.config.evaluation import EvaluationPlacement, EvaluationRun, ModelUnderTest
from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.evaluation.prompts_table import literal_prompts
from rayembed.evaluation.run_scores import prompts_for
from rayembed.evaluation.tables import ScoreKey
from rayembed.evaluation.validation import validate, validation_prompts, validation_tasks
from rayembed.machine import hardware
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes import passes
from rayembed.models.saving.merge import merge_models
from rayembed.pipeline.evaluate.evaluate import evaluate
from rayembed.pipeline.evaluate.run_scorer import RunScorer
from rayembed.pipeline.evaluate.variants import score_saved
from rayembed.pipeline.run.folders import RunFolders
from rayembed.pipeline.run.runtime import runtime_of
from rayembed.recipes.sample import TASK_NAMES

INSTRUCTIONS = {
    "WikiSentenceRetrieval": "find the lazy dog",  # other words than the task's own
    "WikiTopicClassification": "Classify the given encyclopedia article into its topic",
    "WikiTopicClustering": "",  # taken away
}
"""Of a training; it has none for pairs and relatedness, nor for descriptions."""
UNTRAINED = ("WikiTitleDescriptionPairClassification", "WikiRelatednessSTS")
LENGTHS = {"query_max_length": 62, "document_max_length": 62}
SEED = 7
"""Of the runs: no seed of a run decides how its models are scored."""
EMULATED, WITH_UNITS = 1 / 30, 2.4


@pytest.fixture(autouse=True)
def units(monkeypatch):
    """Every machine has units for bfloat16, so that a rule by which scores take what is fast is
    seen; `units(EMULATED)` takes them away.
    """

    def become(speed):
        monkeypatch.setattr(hardware, "bfloat16_speed", lambda: speed)

    become(WITH_UNITS)
    return become


def titled(path):
    """The articles with titles of known words: numbers are all one to the tiny tokenizers, and the
    order of equal scores goes by rounding.
    """
    drawn = random.Random(0)
    found = {}
    for article in json.loads(path.read_text()).values():
        title = " ".join(drawn.sample(WORDS, 6))
        found[title] = {**article, "title": title}
    path.write_text(json.dumps(found))
    return path


def tiny(kind, folder, dtype="float32", long=250):
    """Settings of a tiny model and its pretrained parts."""
    given = {"path": "given", "dtype": dtype}
    if kind == "nvembed":
        long = {"query_max_length": long, "document_max_length": long}
        config = parse(
            NVEmbedConfig,
            {"backbone": given, "pooling": {"kind": "mean"}, "lora": None, **long},
        )
        return config, save_decoder(folder / "llm", "mistral", sliding_window=None)
    if kind == "biencoder":
        prefixes = {"query_prefix": "larger: ", "document_prefix": "the world: "}
        config = parse(BiEncoderConfig, {"backbone": given, **prefixes, **LENGTHS})
        return config, save_encoder(folder / "encoder")
    cde = {"encoder": {"path": "given"}, "num_context": 4, "output": "residual"}
    return parse(CDEConfig, {"backbone": given, **cde, **LENGTHS}), save_cde_stages(folder)


@pytest.fixture(scope="module", params=["nvembed", "biencoder-bfloat16", "cde"])
def trained(request, tmp_path_factory):
    """A run, and the folder of its model as the run leaves it."""
    folder = tmp_path_factory.mktemp(request.param)
    articles = titled(write_word_articles(folder / "articles.json"))
    kind, _, dtype = request.param.partition("-")
    config, parts = tiny(kind, folder, dtype or "float32")
    run = run_over_words(articles, documents=HELD_OUT, queries=40, instructions=INSTRUCTIONS)
    run = run.model_copy(update={"model": config, "seed": SEED})
    build_model(config, parts, seed=3).eval().save(folder / "model", instructions=run.instructions)
    return run, folder / "model"


def by_training(run, folder, storage):
    """Scores as a training run takes those of a stage's model."""
    folders = RunFolders(StoredFolder(str(storage), storage))
    shutil.copytree(folder, folders.model("tiny"))
    return RunScorer(run, folders, runtime_of(run.placement)).score(ScoreKey("tiny")).scores


def by_validation(run, folder):
    """Scores of the same tasks by validation, which then has all of the held-out articles."""
    sets = [own.model_dump(mode="json") for own in run.evaluation.own_sets]
    data = {"kind": "own_sets", "sets": sets}
    validation = json.dumps({"data": data, "every_steps": 5})
    changes = ["stages.one.steps=10", "evaluation.own_sets=[]"]
    validated = override(run, [*changes, f"evaluation.validation={validation}"])
    assert revisions(validation_tasks(validated)) == revisions(tasks_of(run))
    # In the type of training, whatever is emulated.
    model = load_model(folder, dtype=run.model.backbone.dtype)
    return validate(model, validated), validation_prompts(validated)


def by_evaluate_model(folder, sets, storage, **settings):
    """Scores as `jobs/evaluate_model.py` takes them of own sets, in this process."""
    asked = {
        "model": {"reference": str(folder), **settings},
        "own_sets": sets,
        "placement": {"storage_path": str(storage)},
    }
    scored = evaluate(parse(EvaluationRun, asked)).scored
    record = read_yaml((scored.local / "prompts.yaml").read_text())
    return scored.scores, record["prompts"]


def revisions(tasks):
    return {task.metadata.name: task.metadata.dataset["revision"] for task in tasks}


def test_all_who_take_scores_take_the_same(trained, tmp_path):
    run, folder = trained
    sets = run.evaluation.own_sets
    after_training = by_training(run, folder, tmp_path / "run")
    in_training, prompts = by_validation(run, folder)
    with patch.object(passes, "to_device", wraps=passes.to_device) as batches:
        alone, table = by_evaluate_model(folder, sets, tmp_path / "alone")
    assert tuple(alone) == TASK_NAMES
    assert after_training == pytest.approx(alone, abs=1e-12)
    assert in_training == pytest.approx(alone, abs=1e-12)
    with patch.object(passes, "to_device", wraps=passes.to_device) as smaller:
        few, _ = by_evaluate_model(folder, sets, tmp_path / "few", tokens_per_batch=500)
    assert smaller.call_count > 2 * batches.call_count
    dtype = run.model.backbone.dtype
    if dtype == "float32":  # in bfloat16 rounding is seen
        assert few == pytest.approx(alone, abs=1e-6)
    # Controls: in the other type, and in other contexts, it has other scores.
    wrong = {"dtype": "float32" if dtype == "bfloat16" else "bfloat16"}
    if run.model.kind == "cde":
        wrong = {"context_seed": SEED}
    others, _ = by_evaluate_model(folder, sets, tmp_path / "wrong", **wrong)
    assert others != pytest.approx(alone, abs=1e-12)
    # Not only the scores: the very texts before the texts.
    tasks = tasks_of(run)
    told: dict[str, list[str]] = {}
    for row in table:
        told.setdefault(row["task"], []).append(row["prompt"])
    assert literal_prompts(prompts_for(folder, run), tasks) == told
    assert literal_prompts(prompts, tasks) == told
    assert "find the lazy dog" in told["WikiSentenceRetrieval"][0]
    if run.model.kind != "nvembed":
        return
    assert told["WikiRelatednessSTS"] == ["Instruct: Retrieve semantically similar text.\nQuery: "]
    assert told["WikiTopicClustering"] == [""]
    # Control: without an instruction for what was not trained, these tasks have other scores.
    none, _ = by_evaluate_model(
        folder,
        sets,
        tmp_path / "none",
        prompts={"instructions": dict.fromkeys(UNTRAINED, "")},
    )
    differing = {name for name in TASK_NAMES if abs(none[name] - alone[name]) > 1e-3}
    assert differing == set(UNTRAINED)


def save_long_set(folder):
    """A set in BEIR's layout whose documents are longer than 512 tokens, and so many and so near
    to each other that rounding moves their order.
    """
    drawn = random.Random(0)
    ends = [drawn.sample(WORDS, 8) for _ in range(60)]
    documents = [" ".join(drawn.choices(WORDS, k=500) + 10 * end) for end in ends]
    rows = {"corpus": documents, "queries": [" ".join(drawn.sample(end, 4)) for end in ends]}
    (folder / "qrels").mkdir(parents=True)
    for name, texts in rows.items():
        lines = [json.dumps({"_id": f"{name[0]}{i}", "text": t}) for i, t in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    judged = ["query-id\tcorpus-id\tscore", *(f"q{i}\tc{i}\t1" for i in range(len(ends)))]
    (folder / "qrels" / "test.tsv").write_text("\n".join(judged))
    return folder


@pytest.mark.parametrize(
    ("dtype", "speed"),
    [("float32", WITH_UNITS), ("bfloat16", WITH_UNITS), ("bfloat16", EMULATED)],
)
def test_long_texts_are_cut_and_computed_alike_wherever_they_are_scored(
    units, tmp_path, dtype, speed
):
    units(speed)
    config, parts = tiny("nvembed", tmp_path, dtype, long=1024)
    own = {"name": "Long", "path": str(save_long_set(tmp_path / "long"))}
    run = run_over_words(write_word_articles(tmp_path / "articles.json"))
    run = run.model_copy(update={"model": config, "seed": SEED})
    run = override(run, [f"evaluation.own_sets={json.dumps([own])}"])
    folder, storage = tmp_path / "model", str(tmp_path / "asked")
    build_model(config, parts, seed=3).eval().save(folder)

    def by_evaluate(**settings):
        settings = {f"model.{name}": value for name, value in settings.items()}
        scores = rayembed.evaluate(folder, own["path"], output=storage, settings=settings)
        return {"Long": scores["long"]}

    alone = by_evaluate()
    assert by_training(run, folder, tmp_path / "run") == pytest.approx(alone, abs=1e-12)
    # MLflow gets the results, and so names no place of the machine.
    written = {path: path.read_bytes() for path in tmp_path.glob("run/**/*") if path.is_file()}
    assert "scores.yaml" in {path.name for path in written}
    assert [path for path, held in written.items() if str(tmp_path).encode() in held] == []
    assert by_validation(run, folder)[0] == pytest.approx(alone, abs=1e-12)
    # The mixture of a model with itself is the model.
    merge_models([str(folder)] * 2, tmp_path / "merged")
    for one in (folder, tmp_path / "merged"):
        asked = ModelUnderTest(reference=str(one)), run.scores
        scored = score_saved("one", *asked, EvaluationPlacement(storage_path=storage))
        assert scored.scores == pytest.approx(alone, abs=1e-12)
    # Controls: more of a text, and the other type, give another score.
    computed = "float32" if speed == EMULATED else dtype
    (other,) = {"float32", "bfloat16"} - {computed}
    assert by_evaluate(dtype=computed) == alone
    for wrong in ({"max_length": 1024}, {"dtype": other}):
        assert by_evaluate(**wrong) != pytest.approx(alone, abs=1e-12)


def test_number_types_that_a_run_trains_are_scored_after_it(tmp_path):
    articles = titled(write_word_articles(tmp_path / "articles.json"))
    config, parts = tiny("biencoder", tmp_path)
    run = run_over_words(articles, documents=HELD_OUT, queries=40)
    run = override(
        run.model_copy(update={"model": config}),
        [
            "stages.one.loss.precisions=[int8,binary]",
            "evaluation.baselines=[]",
        ],
    )
    folders = RunFolders(StoredFolder(str(tmp_path / "run"), tmp_path / "run"))
    model = folders.model(run.stages[-1].name)
    build_model(config, parts, seed=3).eval().save(Path(model), instructions=run.instructions)
    told = {}
    with patch.object(passes, "to_device", wraps=passes.to_device) as batches:
        found = RunScorer(run, folders, runtime_of(run.placement)).further(told.__setitem__)
    of_two = batches.call_count
    last = run.stages[-1].name
    assert list(found) == [ScoreKey(last, precision="int8"), ScoreKey(last, precision="binary")]
    assert list(told) == ["eval_int8", "eval_binary"]
    for precision, key in zip(("int8", "binary"), found, strict=True):
        storage = tmp_path / precision
        with patch.object(passes, "to_device", wraps=passes.to_device) as batches:
            alone, _ = by_evaluate_model(
                model, run.evaluation.own_sets, storage, precision=precision
            )
        assert found[key].scores == pytest.approx(alone, abs=1e-9)
        assert of_two == batches.call_count, "texts are embedded once for both"
    assert len({tuple(scored.scores.values()) for scored in found.values()}) == 2
    assert not (tmp_path / "run" / "embeddings").exists()
