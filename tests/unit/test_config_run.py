"""Identity, fingerprint and file of a run, over every setting there is."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_leaves import leaves, other_value, put

from rayembed.config.document import fingerprint, read_yaml
from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.config.table import entry_points
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe

NOT_IDENTITY = {"name", "root", "checkpoint_every_steps"}
"""Beside the placement: what a run is called, where data lies, how often it is saved."""

IDENTITY_OF_EVALUATION = {
    "evaluation.validation",
}
"""What chooses the weights."""

RUNS = (
    "nvembed-quickstart",
    "biencoder",
    "biencoder-quickstart",
    "causal2vec-quickstart",
    "nomic-quickstart",
)


def changeable(run: Run) -> Run:
    """The run with negatives and texts everywhere, so that any one setting can be changed."""
    values = run.model_dump(mode="json")
    for dataset in values["data"]["datasets"]:
        dataset["mining"] = (dataset["mining"] or {"teacher": "teacher"}) | {"num_negatives": 20}
    for stage in values["stages"]:
        stage["batch"]["num_negatives"] += 1
    values["placement"]["workers"] = 1
    # It is refused without own data, general tasks and the untrained model.
    values["evaluation"].pop("guard", None)
    if values["model"]["kind"] == "biencoder":
        values["model"]["projections"] = [{"width": 8}]
    return parse(Run, values)


ALLOWED = {"min_workers": 1, "decay_steps": 10**6, "gpu": "H100", "rope": {"base": 1e6}}
"""Values of settings that take few: not more workers than there are, no earlier step than the last,
a GPU that is known, a base or a factor."""


OF_LOSSES = {"loss_learning_rate": "siglip", "teachers": "similarity_distillation"}
"""Settings of a stage that only some losses take, and one that does."""


def fit_dataset(values, leaf) -> None:
    """Change what a changed setting of a data set asks for beside it."""
    if leaf.path[-1] == "held_out":  # of sources that have rows
        put(values, (*leaf.path[:-1], "source"), {"kind": "pairs", "path": "pairs.jsonl"})
    if leaf.path[-1] == "clusters":  # of a stage that takes them
        dataset = values["data"]["datasets"][leaf.path[2]]
        stage = next(s for s in values["stages"] if dataset["name"] in s["datasets"])
        dataset["in_batch_negatives"] = stage["batch"]["in_batch_negatives"] = True
        dataset["clusters"]["batch_pairs"] = stage["batch"]["global_pairs"]
        stage["batch"]["policy"] = "clustered"
        stage["datasets"] = {dataset["name"]: 1.0}
    if leaf.path[-1] == "name":  # stages follow
        for stage in values["stages"]:
            weight = stage["datasets"].pop(leaf.value, None)
            if weight is not None:
                stage["datasets"][other_value(leaf)] = weight


def changed(run: Run, leaf) -> Run:
    values = run.model_dump(mode="json")
    put(values, leaf.path, other_value(leaf))
    if leaf.path[-1] == "sample_share":  # in place of a number
        put(values, (*leaf.path[:-1], "num_samples"), None)
    if leaf.dotted == "evaluation.validation":  # more than the last step must be scored
        put(values, (*leaf.path, "every_steps"), 1)
    if leaf.path[-1] == "gpu":  # of workers on GPUs
        put(values, ("placement", "use_gpu"), True)
    if leaf.path[-1] in ALLOWED:
        put(values, leaf.path, ALLOWED[leaf.path[-1]])
    if leaf.path[-1] in OF_LOSSES:
        put(values, (*leaf.path[:2], "loss"), OF_LOSSES[leaf.path[-1]])
    if leaf.path[-1] in ("directions", "partition"):  # of rows that are compared with each other
        put(values, (*leaf.path[:2], "batch", "in_batch_negatives"), True)
    if leaf.path[-1] == "partition":
        put(values, (*leaf.path[:-1], "directions"), ["document_to_query"])
    if leaf.path[-1] == "frozen":  # then it has no adapters
        put(values, (*leaf.path[:-1], "lora"), None)
    if leaf.path[-1] == "expert_parallel":  # workers that share the experts out
        put(values, ("placement", "workers"), other_value(leaf))
    if leaf.path[-1] == "dimensions" and "dimensions" in values["model"]:
        offered = {*values["model"]["dimensions"], *other_value(leaf)}  # those of each loss
        values["model"]["dimensions"] = sorted(offered, reverse=True)
    if leaf.path[:2] == ("data", "datasets"):
        fit_dataset(values, leaf)
    return parse(Run, values)


@pytest.mark.parametrize("name", RUNS)
def test_placement_keeps_the_fingerprint_and_every_setting_of_identity_changes_it(name):
    run = changeable(get_recipe(name))
    seen = {run.fingerprint: "the run itself"}
    fixed, placed, identity = set(), 0, 0
    first_datasets = ("data", "datasets", 0), ("data", "datasets", 2)
    for leaf in leaves(run):
        if leaf.path[:2] == ("data", "datasets") and leaf.path[:3] not in first_datasets:
            continue  # 45 data sets with the same settings
        if other_value(leaf) is None or leaf.path[-1] in ("kind", "pool"):
            fixed.add(leaf.path[-1])
            continue
        if leaf.path[-1] == "expert_parallel" and not hasattr(run.model, "experts"):
            placed += 1  # refused without experts
            continue
        if leaf.dotted == "evaluation.guard":
            placed += 1  # refused without own data and general tasks
            continue
        other = changed(run, leaf)
        assert other != run, leaf.dotted
        free = leaf.path[0] in ("placement", "evaluation") or leaf.path == ("name",)
        free &= leaf.dotted not in IDENTITY_OF_EVALUATION
        # Where epochs are asked for, steps are an estimate, as the records decide them.
        free |= leaf.path[-1] == "steps" and run.stages[leaf.path[1]].epochs is not None
        if free or leaf.path[-1] in NOT_IDENTITY - {"name"}:
            placed += 1
            assert other.fingerprint == run.fingerprint, leaf.dotted
        else:
            identity += 1
            assert other.fingerprint not in seen, (leaf.dotted, seen.get(other.fingerprint))
            seen[other.fingerprint] = leaf.dotted
    none = set() if entry_points("rayembed.mirrors") else {"mirrors"}
    assert fixed - {"pool"} == {"kind"} | none  # the pool 'given' asks for negatives of the source
    stages = len(run.stages) + sum(stage.epochs is not None for stage in run.stages)
    scored = sum(leaf.path[0] == "evaluation" and leaf.path[-1] != "kind" for leaf in leaves(run))
    scored -= len(IDENTITY_OF_EVALUATION)
    assert (
        placed + len(none) == len(Placement.model_fields) + scored + len({"name", "root"}) + stages
    )
    assert identity > 40


def test_the_fingerprint_is_the_sha256_of_canonical_json():
    text = '{"a":[1.5,null],"b":"é"}'
    assert (
        fingerprint({"b": "é", "a": [1.5, None]})
        == (hashlib.sha256(text.encode()).hexdigest()[:12])
    )
    with pytest.raises(TypeError):
        fingerprint({"a": object()})


def test_the_order_of_weights_and_instructions_decides_nothing():
    run = get_recipe("nvembed-quickstart")
    values = run.model_dump(mode="json")
    for stage in values["stages"]:
        stage["datasets"] = dict(reversed(stage["datasets"].items()))
    values["evaluation"]["instructions"] = dict(
        reversed(values["evaluation"]["instructions"].items())
    )
    other = parse(Run, values)
    assert other.fingerprint == run.fingerprint
    assert other.to_yaml() == run.to_yaml()


def test_the_order_of_stages_decides():
    run = get_recipe("nvembed-quickstart")
    values = run.model_dump(mode="json")
    values["stages"].reverse()
    assert parse(Run, values).fingerprint != run.fingerprint


def test_the_fingerprint_is_the_same_in_another_process():
    code = (
        "from rayembed.recipes.catalogue import get_recipe;"
        "print(get_recipe('cde-quickstart').fingerprint)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {get_recipe("cde-quickstart").fingerprint}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
floats = st.floats(1e-30, 1e30, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(texts, texts, texts, floats, st.integers(0, 2**32 - 1), st.sampled_from([True, "auto"]))
def test_any_run_comes_back_from_its_text(prefix, task, path, rate, seed, cache):
    values = get_recipe("biencoder-quickstart").model_dump(mode="json")
    values["seed"] = seed
    values["model"]["query_prefix"] = prefix
    values["data"]["datasets"][0]["query_instruction"] = task
    values["data"]["datasets"][0]["source"]["path"] = path
    values["evaluation"]["instructions"] = {"Task" + task: prefix}
    values["stages"][0]["optimizer"]["learning_rate"] = rate
    values["stages"][0]["datasets"]["wiki-sentence"] = rate
    values["placement"]["grad_cache"] = cache
    run = parse(Run, values)
    again = parse(Run, read_yaml(run.to_yaml()))
    assert again == run
    assert again.fingerprint == run.fingerprint


def test_a_run_comes_back_from_its_file(tmp_path):
    run = override(
        get_recipe("nvembed-quickstart"), ["model.instruction_template=\n{instruction}\x85 "]
    )
    (tmp_path / "run.yaml").write_text(run.to_yaml(), encoding="utf-8")
    again = Run.read(tmp_path / "run.yaml")
    assert again == run
    assert again.to_yaml() == run.to_yaml()


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_text_that_means_something_else_in_yaml_stays_a_text(text):
    run = get_recipe("biencoder")
    for special in (
        text,
        "null",
        "~",
        "no",
        "2e-5",
        "1_000",
        "2024-01-01",
        "0o7",
        "1:30",
        "query: ",
    ):
        values = run.model_dump(mode="json")
        values["model"]["query_prefix"] = special
        changed_run = parse(Run, values)
        assert override(run, [f"model.query_prefix={special}"]) == changed_run
        assert changed_run.model.query_prefix == special


def test_hand_written_yaml_needs_only_what_has_no_default(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        """
        name: 2024-01-01
        model: {kind: biencoder, backbone: {path: model}}
        data:
          datasets: [{name: no, source: {kind: pairs, path: pairs.jsonl}}]
        stages:
          - name: only
            datasets: {no: 1}
            batch: {global_pairs: 8, in_batch_negatives: yes}
            optimizer: {learning_rate: 2e-5}
            steps: 10
        placement: {zero_stage: 2, grad_cache: off}
        """
    )
    run = Run.read(file)
    assert run.name == "2024-01-01"
    assert run.stages[0].optimizer.learning_rate == 2e-5
    assert run.stages[0].datasets == {"no": 1.0}
    assert run.stages[0].batch.in_batch_negatives is True
    assert run.placement.zero_stage == 2
    assert run.placement.grad_cache is False
    assert not run.evaluation.any_tasks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: [a", "cannot read the settings file"),
        ("- a\n- b", "must contain a YAML mapping"),
        ("", "must contain a YAML mapping"),
        ("name: a\nname: b", "the name 'name' is given twice"),
        ("? [a]\n: b", "must be a text"),
        ("name: a", "setting 'model' is required"),
        ("seed: !!python/object:os.system x", "cannot read the settings file"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path, content, message):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Run.read(file)


def test_a_file_that_is_missing_or_not_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        Run.read(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        Run.read(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        Run.read(tmp_path)


def test_settings_are_frozen_and_finite():
    run = get_recipe("biencoder")
    with pytest.raises(ValueError, match="frozen"):
        run.seed = 1
    for value in ("nan", "inf", "1e400"):
        with pytest.raises(ConfigError, match=r"stages\.finetune\.optimizer\.learning_rate"):
            override(run, [f"stages.finetune.optimizer.learning_rate={value}"])


def test_identity_is_plain_json_without_the_placement():
    identity = get_recipe("cde-quickstart").identity()
    assert json.loads(json.dumps(identity)) == identity
    assert sorted(identity) == ["data", "model", "seed", "stages"]
    assert "root" not in identity["data"]


def test_config_and_recipes_import_neither_torch_nor_ray():
    code = (
        "import sys; import rayembed.recipes.catalogue, rayembed.config.override;"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_results_need_a_place():
    with pytest.raises(ConfigError, match=r"placement\.storage_path"):
        override(get_recipe(RUNS[0]), ["placement.storage_path="])


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("it's", '"\'"'),
        ('a"b', "'\"'"),
        ("a/b@c", "'/', '@'"),
        (".a", "starting with"),
        ("", "starting with"),
    ],
)
def test_a_registered_models_name_is_one_that_mlflow_can_search(name, seen):
    with pytest.raises(
        ConfigError, match=r"^registered_model: .* letters, digits, spaces and"
    ) as told:
        parse(Placement, {"registered_model": name})
    assert seen in str(told.value)
    for fine in ("team v2.1_a+b-c", "模型", None):
        assert parse(Placement, {"registered_model": fine}).registered_model == fine
