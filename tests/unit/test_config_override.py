"""`--set path.to.setting=value`."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_leaves import leaves, other_value, put

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.mining.rules import PercPos
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe


@pytest.fixture
def run() -> Run:
    return get_recipe("nvembed-quickstart")


@pytest.mark.parametrize("text", ["2e-5", "2E-5", "0.00002", "2.0e-05"])
def test_numbers_are_read_as_people_write_them(run, text):
    found = override(run, [f"stages.blend.optimizer.learning_rate={text}"])
    assert found.stages[1].optimizer.learning_rate == 2e-5
    assert found.stages[0] == run.stages[0]


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-300, 1e300))
def test_a_number_is_the_one_written(number):
    run = get_recipe("biencoder")
    found = override(run, [f"stages.finetune.optimizer.learning_rate={number!r}"])
    assert found.stages[0].optimizer.learning_rate == number


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_a_text_is_taken_to_its_last_character(text):
    found = override(get_recipe("biencoder"), [f"model.query_prefix={text}"])
    assert found.model.query_prefix == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("neg", "neg"),
        ("neg #1", "neg #1"),
        ("'neg'", "'neg'"),
        ("a: b", "a: b"),
        ("null", None),
        ("[neg_1, neg 2]", ("neg_1", "neg 2")),
        ("[]", ()),
    ],
)
def test_a_setting_of_a_text_or_a_list_takes_a_list_where_it_begins_like_one(text, value):
    run = get_recipe("biencoder")
    path = f"data.datasets.{run.data.datasets[0].name}.source"
    run = override(run, [f"{path}.negatives=x", "stages.finetune.batch.num_negatives=7"])
    others = ["stages.finetune.batch.num_negatives=0"] if not value else []
    found = override(run, [f"{path}.negatives={text}", *others])
    assert found.data.datasets[0].source.negatives == value


@pytest.mark.parametrize("text", ["", "[a, '']", "[[a]]"])
def test_what_is_no_column_is_refused_in_one_line(text):
    run = get_recipe("biencoder")
    setting = f"data.datasets.{run.data.datasets[0].name}.source.negatives"
    with pytest.raises(
        ConfigError, match="must be the name of a column, or a list of column names"
    ) as caught:
        override(run, [f"{setting}={text}"])
    assert "\n" not in str(caught.value)


def test_every_setting_can_be_set(run):
    tried = 0
    for leaf in leaves(run):
        value = other_value(leaf)
        if value is None or leaf.path[-1] in ("kind", "name", "pairs"):
            continue
        values = run.model_dump(mode="json")
        put(values, leaf.path, value)
        try:
            expected = parse(Run, values)
        except ConfigError:  # does not go together with another setting of this run
            continue
        if isinstance(value, dict):
            continue
        assert override(run, [f"{leaf.dotted}={_written(value)}"]) == expected, leaf.dotted
        tried += 1
    assert tried > 80


def _written(value: object) -> str:
    if isinstance(value, list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_elements_go_by_name_or_place(run):
    by_name = override(run, ["stages.blend.steps=11"])
    assert by_name == override(run, ["stages.1.steps=11"])
    assert by_name.stages[1].steps == 11
    assert by_name.stages[0].steps == run.stages[0].steps
    path = "data.datasets.wiki-sentence.mining.num_negatives"
    assert override(run, [f"{path}=5"]).data.datasets[1].mining.num_negatives == 5


def test_lists_and_groups_are_yaml(run):
    found = override(
        run,
        [
            "evaluation.baselines=[bm25]",
            "model.lora.target_modules=[q_proj, v_proj]",
            "stages.blend.optimizer.betas=[0.8, 0.99]",
            "stages.retrieval.datasets={wiki-sentence: 3}",
            "model.pooling={kind: latent_attention, num_latents: 16, head_dim: null}",
        ],
    )
    assert found.evaluation.baselines == ("bm25",)
    assert found.model.lora.target_modules == ("q_proj", "v_proj")
    assert found.stages[1].optimizer.betas == (0.8, 0.99)
    assert found.stages[0].datasets == {"wiki-sentence": 3.0}
    assert (found.model.pooling.num_latents, found.model.pooling.head_dim) == (16, None)
    assert found.model.pooling.num_heads == 8


def test_a_list_that_is_not_yaml_says_what_to_quote(run):
    with pytest.raises(ConfigError, match="put quotes around texts"):
        override(run, ["evaluation.baselines=[bm25, pypi://a==1/b?sha256=c]"])
    found = override(run, ["evaluation.baselines=[bm25, 'pypi://a==1/b?sha256=c']"])
    assert found.evaluation.baselines[1] == "pypi://a==1/b?sha256=c"


def test_null_is_none_where_none_is_allowed(run):
    found = override(run, ["model.lora=null", "placement.threads_per_worker=null"])
    assert found.model.lora is None
    assert found.placement.threads_per_worker is None
    assert override(run, ["placement.experiment=null"]).placement.experiment == "null"
    with pytest.raises(ConfigError, match=r"stages\.retrieval\.steps = 'null'"):
        override(run, ["stages.retrieval.steps=null"])


def test_below_a_group_that_is_null_the_defaults_count(run):
    found = override(run, ["model.lora=null", "model.lora.rank=4"])
    assert found.model.lora.rank == 4
    assert found.model.lora.alpha == 32
    path = "data.datasets.wiki-topic-clustering.mining"
    assert override(run, [f"{path}.teacher=here"]).data.datasets[3].mining.teacher == "here"
    with pytest.raises(
        ConfigError, match=r"datasets\.wiki-topic-clustering\.mining\.teacher' is required"
    ):
        override(run, [f"{path}.num_negatives=2"])


def test_another_kind_drops_the_settings_of_the_former_and_the_same_kind_keeps_them(run):
    found = override(run, ["model.pooling.kind=self_attention", "model.pooling.num_heads=4"])
    assert (found.model.pooling.kind, found.model.pooling.num_heads) == ("self_attention", 4)
    assert override(run, ["model.pooling.kind=latent_attention"]) == run
    back = override(found, ["model.pooling.kind=latent_attention"])
    assert back.model.pooling.num_latents == 512  # the default, not the recipe's 64
    with pytest.raises(ConfigError, match=r"no setting 'model\.pooling\.num_latents'"):
        override(run, ["model.pooling.kind=mean", "model.pooling.num_latents=3"])


def test_names_of_the_user_may_be_new_and_hold_dots(run):
    found = override(
        run,
        [
            "evaluation.instructions.My.Task=Find it",
            "stages.retrieval.datasets.wiki-topic-clustering=2",
        ],
    )
    assert found.evaluation.instructions["My.Task"] == "Find it"
    assert found.stages[0].datasets["wiki-topic-clustering"] == 2.0


def test_later_assignments_win_and_the_run_stays_as_it_was(run):
    before = run.to_yaml()
    assert override(run, ["seed=1", "seed=2"]).seed == 2
    assert run.to_yaml() == before
    assert override(run, []) == run


def test_two_settings_that_only_hold_together_can_be_set_together(run):
    with pytest.raises(ConfigError):
        override(run, ["placement.workers=3"])
    found = override(
        run,
        ["placement.workers=3", "stages.0.batch.global_pairs=6", "stages.1.batch.global_pairs=9"],
    )
    assert found.placement.workers == 3


def test_groups_below_a_group_that_is_null_start_from_their_defaults():
    mining = "data.datasets.pairs.mining"
    stage = "stages.finetune.batch.num_negatives=7"
    made = override(
        get_recipe("biencoder"), [f"{mining}.teacher=t", f"{mining}.rule.kind=top_k", stage]
    )
    assert made.data.datasets[0].mining.rule.kind == "top_k"
    stricter = [f"{mining}.rule.max_relative_score=0.9", f"{mining}.teacher=t", stage]
    assert override(get_recipe("biencoder"), stricter).data.datasets[0].mining.rule == PercPos(
        max_relative_score=0.9
    )
