"""What is checked in the driver: assets that are opened without weights, room for instructions."""

import json
import sys
from typing import Literal

import pytest
from made_up_articles import run_over, write_articles
from tiny_models import save_decoder, save_encoder

from rayembed.config.loss import LossConfig
from rayembed.config.override import override
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.prepare import prepare
from rayembed.errors import ArtifactError, AssetError, ConfigError, DataError, RayembedError
from rayembed.models.loading.build import check_buildable
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.pipeline.checks.model import check_inputs, check_instructions, check_row_instructions
from rayembed.recipes.sample import TASK_NAMES

TAKEN = "stages.one.batch.num_negatives=7"
LONG = "retrieve the rest of the text " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    save_encoder(folder / "encoder")
    save_decoder(folder / "decoder")
    write_articles(folder / "articles.json")
    return folder


@pytest.fixture
def run(folder):
    lengths = ["model.query_max_length=40", "model.document_max_length=50"]
    backbone = f"model.backbone.path={folder}/encoder"
    return override(run_over(folder / "articles.json"), [backbone, *lengths])


def nvembed(run, folder, *assignments):
    model = f"{{kind: nvembed, backbone: {{path: {folder}/decoder}}, query_max_length: 60}}"
    sizes = "model.pooling={kind: latent_attention, num_latents: 4, num_heads: 2}"
    return override(run, [f"model={model}", sizes, *assignments])


def test_widths_of_a_loss_are_below_that_of_the_vectors(run):
    fits = override(run, ["stages.one.loss.dimensions=[16,8]"])
    check_inputs(fits)
    wide = override(run, ["stages.one.loss.dimensions=[32]"])
    with pytest.raises(
        ConfigError, match=r"one\.loss\.dimensions names \[32\], .* full width is 32"
    ):
        check_inputs(wide)
    with pytest.raises(ConfigError, match="contains a value twice"):
        override(run, ["stages.one.loss.dimensions=[8,8]"])


def test_patterns_of_rates_match_weights_of_model_or_loss(run):
    loss = ["stages.one.loss={kind: siglip}"]
    check_inputs(override(run, [*loss, "stages.one.optimizer.rates={'loss:bias': 0.1}"]))
    wrong = override(run, ["stages.one.optimizer.rates={'embedings.*': 0.1}"])
    with pytest.raises(ConfigError, match="no trained parameter matches 'embedings"):
        check_inputs(wrong)


def test_rates_of_parameters_that_there_are_not_are_refused(run, folder):
    fresh = "stages.one.optimizer.pooling_learning_rate=0.1"
    with pytest.raises(ConfigError, match=r"pooling_learning_rate=0\.1 has no effect"):
        check_inputs(override(run, [fresh]))
    check_inputs(override(run, [fresh, "model.projections=[{width: 8}]"]))
    loss = ["stages.one.loss={kind: vector_distillation}"]
    loss += [f"stages.one.teachers=[{{teacher: {folder}/encoder}}]"]
    rate = "stages.one.optimizer.loss_learning_rate=0.1"
    with pytest.raises(ConfigError, match=r"loss_learning_rate=0\.1 has no effect"):
        check_inputs(override(run, [*loss, rate]))
    check_inputs(override(run, [*loss, rate, "stages.one.loss.projection=true"]))


def test_settings_without_effect_are_told(run, caplog):
    check_inputs(override(run, ["placement.validations_at_once=2"]))
    assert "placement.validations_at_once=2 has no effect" in caplog.text
    caplog.clear()
    check_inputs(run)
    assert "no effect" not in caplog.text


def test_a_stages_teachers_are_opened_and_their_widths_fit_the_loss(run, folder):
    def taught(path, **loss):
        values = json.dumps({"kind": "vector_distillation", **loss})
        teachers = f"stages.one.teachers=[{{teacher: {path}}}]"
        return override(run, [teachers, f"stages.one.loss={values}"])

    if not (folder / "wide").exists():
        save_encoder(folder / "wide", hidden_size=64)
    check_inputs(taught(folder / "encoder", projection=False))
    wide = taught(folder / "wide")
    rates = "stages.one.optimizer.rates={'loss:projection': 0.1}"
    check_inputs(override(wide, [rates]))
    with pytest.raises(ConfigError, match="no trained parameter matches 'loss:projection'"):
        check_inputs(override(taught(folder / "encoder"), [rates]))
    with pytest.raises(
        ConfigError, match=r"have 32 dimensions and those of the stage's teachers have 64"
    ):
        check_inputs(taught(folder / "wide", projection=False))
    with pytest.raises(AssetError, match=r"stages\.one\.teachers\.0\.teacher cannot be used"):
        check_inputs(taught(folder / "none"))


class Scores(LossConfig):
    """A loss of scores, which no model of embeddings gives."""

    kind: Literal["scores"] = "scores"


def test_a_loss_that_is_none_of_embeddings_is_told_before_data_are_made(run):
    stage = run.stages[0].model_copy(update={"loss": Scores()})
    with pytest.raises(ConfigError, match="does not work on embeddings"):
        check_inputs(run.model_copy(update={"stages": (stage,)}))


def test_what_searches_in_bits_must_be_there_before_a_run_trains_them(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    name = run.stages[0].name
    check_inputs(override(run, [f"stages.{name}.loss.precisions=[int8]"]))
    with pytest.raises(ConfigError, match=r"binary vectors .*precisions.* need FAISS"):
        check_inputs(override(run, [f"stages.{name}.loss.precisions=[binary]"]))


def test_widths_that_a_mixture_offers_are_learnt(run, folder, caplog):
    model = f"model={{kind: nomic-moe, backbone: {{path: {folder}/encoder}}, dimensions: [16]}}"
    lengths = ["model.query_max_length=40", "model.document_max_length=50"]
    check_inputs(override(run, [model, *lengths]))
    assert "no stage of this run learns vectors cut to 16" in caplog.text
    caplog.clear()
    check_inputs(override(run, [model, *lengths, "stages.one.loss.dimensions=[16]"]))
    assert "cut to 16" not in caplog.text
    with pytest.raises(ConfigError, match=r"trains the vector widths \[8\], but model\.dimensions"):
        override(run, [model, *lengths, "stages.one.loss.dimensions=[8]"])


def test_a_run_that_holds_passes(run, folder):
    tokenizer = check_inputs(run)
    assert tokenizer.budget("query") == 38
    check_inputs(nvembed(run, folder, "data.datasets.wiki.query_instruction=find"))
    relative = override(
        run, [f"data.root={folder}", "data.datasets.wiki.source.path=articles.json"]
    )
    check_inputs(relative)


@pytest.mark.parametrize(
    ("assignments", "error", "message"),
    [
        (["model.backbone.path=/nowhere"], AssetError, "/nowhere"),
        (["model.document_max_length=65"], ConfigError, "document_max_length is 65, .* 64 posit"),
        (["model.query_max_length=2"], ConfigError, "query_max_length is 2, but special tokens"),
        (["model.lora={target_modules: [quer]}"], ConfigError, "'quer'.*did you mean 'query'"),
        (
            [TAKEN, "data.datasets.wiki.mining={teacher: /nowhere}"],
            AssetError,
            r"^data\.datasets\.wiki\.mining\.teacher cannot be used: .*/nowhere",
        ),
        (
            [TAKEN, "data.datasets.wiki.mining={teacher: ENCODER, rescoring: {model: ENCODER}}"],
            AssetError,
            r"^data\.datasets\.wiki\.mining\.rescoring\.model cannot be used: .*BertModel",
        ),
        (["evaluation.baselines=[bm25, /nowhere]"], AssetError, r"evaluation\.baselines\.1 cannot"),
        (["evaluation.instructions={WikiSentence: x}"], ConfigError, "task type 'WikiSentence'"),
        (["data.datasets.wiki.source.path=sample://wikipedia/topic.jsonl"], AssetError, "topic.js"),
        (["evaluation.own_sets.WikiRelatednessSTS.path=/nowhere"], DataError, "/nowhere"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_the_driver(run, folder, assignments, error, message):
    assignments = [one.replace("ENCODER", f"{folder}/encoder") for one in assignments]
    with pytest.raises(error, match=message):
        check_inputs(override(run, assignments))


def broken(folder, target, **files):
    """A copy of the tiny encoder with other files; None removes one."""
    import shutil

    shutil.copytree(folder / "encoder", target)
    for name, content in files.items():
        path = target / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_text(json.dumps(content))
    return target


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


TWO_MODES = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}


@pytest.mark.parametrize(
    "files",
    [
        {"modules.json": [{**MODULES[0], "type": "other.Module"}]},
        {"modules.json": MODULES, "1_Pooling__config.json": TWO_MODES},
        {"config.json": {"model_type": "unheard-of", "max_position_embeddings": 8}},
        {"config.json": {"model_type": "t5", "max_position_embeddings": 8}},
        {"config.json": None},
        {"tokenizer.json": None},
        {"model.safetensors": None},
        {"rayembed.json": {"format_version": 99}},
    ],
    ids=["modules", "pooling", "family", "decoder", "config", "tokenizer", "weights", "format"],
)
def test_what_load_model_would_refuse_is_refused_without_weights(folder, tmp_path, run, files):
    made = broken(folder, tmp_path / "model", **files)
    with pytest.raises(ArtifactError):
        load_model(made)
    with pytest.raises(ArtifactError):
        check_loadable(made)
    with pytest.raises(RayembedError, match=r"baselines\.0 cannot be used"):
        check_inputs(override(run, [f"evaluation.baselines=[{made}]"]))


def test_what_load_model_takes_is_taken(folder, tmp_path):
    check_loadable(folder / "encoder")
    check_loadable(folder / "decoder")
    load_model(folder / "encoder").save(tmp_path / "saved")
    check_loadable(tmp_path / "saved")
    modules = {"modules.json": MODULES, "1_Pooling__config.json": {"pooling_mode_cls_token": True}}
    made = broken(folder, tmp_path / "cls", **modules)
    check_loadable(made)
    assert load_model(made).config.pooling.kind == "cls"


@pytest.mark.parametrize(
    ("setting", "role"),
    [
        ("data.datasets.wiki.query_instruction", "query"),
        ("data.datasets.wiki.document_instruction", "document"),
        ("evaluation.instructions.WikiSentenceRetrieval", "query"),
        ("model.query_prefix", "query"),
        ("model.document_prefix", "document"),
    ],
)
def test_an_instruction_without_room_names_itself_and_what_to_set(run, setting, role):
    if setting.startswith("evaluation"):
        assignment = f"evaluation.instructions={{WikiSentenceRetrieval: {LONG}}}"
    else:
        assignment = f"{setting}={LONG}"
    with pytest.raises(ConfigError, match=f"set model.{role}_max_length to more than") as error:
        check_inputs(override(run, [assignment]))
    assert str(error.value).startswith(f"{setting}: ")
    assert len(str(error.value)) < 500


def test_the_instruction_of_a_task_that_is_not_trained_needs_room_too(run, folder):
    short = nvembed(run, folder, "model.query_max_length=30")
    with pytest.raises(ConfigError, match=r"task Wiki\w+ \(evaluation\.instructions\.Wiki\w+\): "):
        check_inputs(short)
    none = json.dumps(dict.fromkeys(TASK_NAMES, ""))
    check_inputs(override(short, [f"evaluation.instructions={none}"]))
    sets = [own.model_dump(mode="json") for own in run.evaluation.own_sets]
    validated = json.dumps({"data": {"kind": "own_sets", "sets": sets}, "every_steps": 1})
    told = ["stages.one.steps=2", "evaluation.own_sets=[]", f"evaluation.validation={validated}"]
    with pytest.raises(ConfigError, match="the instruction of the task WikiSentenceRetrieval"):
        check_inputs(override(short, told))


def test_a_stage_that_reads_less_names_itself(run):
    told = "data.datasets.wiki.query_instruction=retrieve the rest of the text"
    run = override(run, [told])
    check_inputs(run)
    shorter = override(run, ["stages.one.query_max_length=9"])
    with pytest.raises(
        ConfigError, match=r"stages\.one\.query_max_length=9 has room .* set stages"
    ):
        check_inputs(shorter)
    # Instructions of data sets that the stage does not have, and of other stages, are not its own.
    check_inputs(override(run, ["stages.one.document_max_length=9"]))


def with_examples(run, folder, *assignments):
    model = (
        f"{{kind: causal2vec, backbone: {{path: {folder}/decoder}}, query_max_length: 200, "
        f"encoder: {{path: {folder}/encoder, max_length: 32}}, "
        "examples: {max_tokens: 120, query_tokens: 20, response_tokens: 20}}"
    )
    return override(run, [f"model={model}", *assignments])


def test_examples_need_an_instruction_and_room_in_every_stage(run, folder):
    told = "data.datasets.wiki.query_instruction=find"
    check_inputs(with_examples(run, folder, told))
    with pytest.raises(ConfigError, match="no data set of a stage has an instruction"):
        check_inputs(with_examples(run, folder))
    with pytest.raises(
        ConfigError, match=r"max_tokens is 120, but stages\.one\.query_max_length 90"
    ):
        check_inputs(with_examples(run, folder, told, "stages.one.query_max_length=90"))


@pytest.mark.parametrize("kind", ["biencoder", "nvembed"])
def test_told_exactly_where_tokens_of_a_text_would_be_refused(run, folder, kind):
    run = run if kind == "biencoder" else nvembed(run, folder)
    task = "are cats larger than dogs"
    run = override(run, [f"data.datasets.wiki.query_instruction={task}"])
    refused = []
    for length in range(3, 40):
        tried = override(run, [f"model.query_max_length={length}"])
        start = folder / ("encoder", "decoder")[kind == "nvembed"]
        tokenizer = check_buildable(tried.model, start).tokenizer
        fits = True
        try:
            tokenizer(["7 a", "a cat", "é"], "query", [task] * 3)
        except DataError:
            fits = False
        if fits:
            check_instructions(tried, tokenizer)
            continue
        with pytest.raises(ConfigError):
            check_instructions(tried, tokenizer)
        refused.append(length)
    assert 3 < len(refused) < 37


def test_instructions_of_rows_are_checked_in_the_plan(run, folder, tmp_path):
    rows = [{"query": f"q {i}", "positive": f"p {i}", "task": "find"} for i in range(8)]
    source = f"{{kind: pairs, path: {tmp_path}/rows.jsonl, instruction: task}}"
    run = override(run, [f"data.datasets.wiki.source={source}", "evaluation.own_sets=[]"])
    tokenizer = check_inputs(run)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    check_row_instructions(
        run, prepare(run, PipelineContext(str(tmp_path / "fits"), run.seed)), tokenizer
    )
    for row in rows[:5]:  # a step has four of the eight
        row["task"] = LONG
    path.write_text("\n".join(map(json.dumps, rows)))
    plans = prepare(run, PipelineContext(str(tmp_path / "long"), run.seed))
    with pytest.raises(ConfigError, match=r"column 'task' of the data set 'wiki': .*retrieve the"):
        check_row_instructions(run, plans, tokenizer)
