"""Settings of scores while training goes on, and which of them are part of a run's identity."""

import pytest
from own_pairs import own_run
from settings_leaves import leaves, other_value, put

from rayembed.config.override import override
from rayembed.config.run import Run, of_stages
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe

KEEP_LAST = "evaluation.validation.keep=last"
MTEB_TASK = "evaluation.validation.data.tasks=[NanoNQRetrieval]"

DATA = {
    "own_sets": {
        "kind": "own_sets",
        "sets": [
            {"kind": "retrieval", "name": "sentences", "path": "mine", "instruction": "find"},
            {"kind": "classification", "name": "topics", "path": "test", "train": "train"},
            {"kind": "clustering", "name": "groups", "path": "texts"},
        ],
    },
    "beir": {"kind": "beir", "path": "mine", "instruction": "find"},
    "mteb": {
        "kind": "mteb",
        "tasks": ["NanoNQRetrieval", "NanoSCIDOCSRetrieval"],
        "instructions": {"NanoNQRetrieval": "find"},
    },
}


def with_validation(kind="own_sets", **validation) -> Run:
    values = get_recipe("nvembed-quickstart").model_dump(mode="json")
    for stage in values["stages"]:
        stage |= {"steps": 500, "checkpoint_every_steps": 100}
    stopping = {"patience": 3, "min_delta": 0.1}
    values["evaluation"]["validation"] = {
        "data": DATA[kind],
        "every_steps": 50,
        "early_stopping": stopping,
        **validation,
    }
    return parse(Run, values)


@pytest.mark.parametrize("kind", DATA)
def test_all_that_chooses_weights_is_identity(kind):
    run = with_validation(kind)
    seen = {run.fingerprint}
    changed = set()
    for leaf in leaves(run):
        if leaf.path[:2] != ("evaluation", "validation") or leaf.path[-1] in ("kind", "keep"):
            continue
        values = run.model_dump(mode="json")
        put(values, leaf.path, other_value(leaf))
        seen.add(parse(Run, values).fingerprint)
        changed.add(leaf.dotted)
    assert len(seen) == len(changed) + 1
    assert {"every_steps", "patience", "min_delta"} < {name.split(".")[-1] for name in changed}


def test_tasks_weights_are_identity_in_any_order():
    names = DATA["mteb"]["tasks"]
    weights = dict(zip(names, (2.0, 3.0), strict=True))
    run = with_validation("mteb", weights=weights)
    turned = with_validation("mteb", weights=dict(reversed(weights.items())))
    assert run.fingerprint == turned.fingerprint
    assert run.fingerprint != with_validation("mteb").fingerprint


def test_scores_that_choose_nothing_are_no_identity():
    plain = override(with_validation(), ["evaluation.validation=null"])
    watched = override(with_validation(), ["evaluation.validation.early_stopping=null", KEEP_LAST])
    assert watched.fingerprint == plain.fingerprint
    assert watched.fingerprint != with_validation().fingerprint
    assert "validation" not in plain.identity()


def test_every_checkpoint_makes_the_interval_of_checkpoints_identity():
    at_checkpoints = with_validation(every_steps=None)
    other = override(at_checkpoints, ["stages.retrieval.checkpoint_every_steps=50"])
    assert at_checkpoints.fingerprint != other.fingerprint
    fixed = with_validation(every_steps=50)
    other = override(fixed, ["stages.retrieval.checkpoint_every_steps=50"])
    assert fixed.fingerprint == other.fingerprint


def test_instructions_of_validation_tasks_alone_are_identity():
    run = with_validation()
    task = run.evaluation.validation.data.task_names[0]
    other = override(run, [f"evaluation.instructions.{task}=another"])
    assert other.fingerprint != run.fingerprint
    elsewhere = override(run, ["evaluation.instructions.WikiTopicClustering=another"])
    assert elsewhere.fingerprint == run.fingerprint


def test_what_is_refused_of_a_held_out_part(tmp_path):
    held_out = "evaluation.validation={data: {kind: held_out}, every_steps: 1}"
    run = own_run(tmp_path, held_out)
    assert run.validation_names == ("pairs-held-out",)
    told = override(run, ["evaluation.instructions={pairs-held-out: other words}"])
    assert told.fingerprint != run.fingerprint
    weighted = "evaluation.validation.weights={pears-held-out: 2}"
    with pytest.raises(
        ConfigError, match=r"evaluation\.validation\.weights names 'pears-held-out'"
    ):
        override(run, [weighted])
    second = {**run.stages[0].model_dump(mode="json"), "name": "second", "datasets": {"more": 1}}
    values = run.model_dump(mode="json")
    more = {**values["data"]["datasets"][0], "name": "more", "held_out": None}
    values["data"]["datasets"].append(more)
    two = parse(Run, {**values, "stages": [*values["stages"], second]})
    assert of_stages(two, ["finetune"]).validation_names == ("pairs-held-out",)
    with pytest.raises(ConfigError, match="no data set of this run has a held-out part"):
        of_stages(two, ["second"])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (KEEP_LAST, r"early_stopping with keep 'last'.*set keep=best"),
        ("evaluation.validation.weights={sentence: 2}", "did you mean 'sentences'"),
        ("evaluation.validation.every_steps=500", "only the last step of a stage would be scored"),
        ("evaluation.validation.data.sets=[]", "at least 1 item"),
        ("evaluation.validation.data.sets.topics.name=groups", "own sets have the name 'groups'"),
        ("evaluation.validation.data.kind=wiki", "must be one of"),
        (
            "evaluation.validation.data={kind: held_out}",
            "no data set of this run has a held-out part; set data.datasets",
        ),
        ("evaluation.validation.patience=1", "no setting 'evaluation.validation.patience'"),
    ],
)
def test_what_cannot_be_is_refused(assignment, message):
    with pytest.raises(ConfigError, match=message):
        override(with_validation(), [assignment])


def test_relative_paths_of_own_sets_are_taken_from_the_root_of_data():
    run = override(with_validation(), ["data.root=s3://bucket/data"])
    first, classes, _ = run.validation_scores.own_sets
    assert first.path == "s3://bucket/data/mine"
    assert classes.paths == ("s3://bucket/data/test", "s3://bucket/data/train")
    made = override(run, ["evaluation.validation.data.sets.groups.path=sample://wikipedia/x"])
    assert made.validation_scores.own_sets[2].path == "sample://wikipedia/x"


def test_the_command_line_turns_validation_on():
    plain = override(with_validation(), ["evaluation.validation=null"])
    run = override(
        plain,
        ["evaluation.validation={data: {kind: beir, path: mine}, every_steps: 10}"],
    )
    assert run.evaluation.validation.data.task_names == ("validation",)
    again = override(run, ["evaluation.validation.data.kind=mteb", MTEB_TASK])
    assert again.evaluation.validation.data.tasks == ("NanoNQRetrieval",)
