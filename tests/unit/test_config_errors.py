"""What a wrong setting says: where it is, what is allowed, which setting was meant."""

import pickle

import pytest
from settings_leaves import groups, leaves, put

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe

RUNS = ("nvembed-quickstart", "biencoder", "cde-quickstart")


def misspelt(name: str) -> str:
    """The name with one letter doubled in the middle."""
    middle = len(name) // 2
    return name[:middle] + name[middle] + name[middle:]


def some_groups(run: Run):
    """All groups of the run, of its data sets only two."""
    return [
        (path, group)
        for path, group in groups(run)
        if path[:2] != ("data", "datasets") or len(path) < 3 or path[2] in (0, 3)
    ]


def by_name(settings, path):
    """The path with elements of lists by their names, where they have some."""
    for part in path:
        below = settings[part] if isinstance(part, int) else getattr(settings, part, None)
        name = getattr(below, "name", None) if isinstance(part, int) else None
        yield str(name or part)
        settings = below


@pytest.mark.parametrize("name", RUNS)
def test_a_misspelt_setting_at_any_level_names_its_path_and_the_nearest(name):
    run = get_recipe(name)
    tried = 0
    for path, group in some_groups(run):
        for field in type(group).model_fields:
            wrong = misspelt(field)
            dotted = ".".join(str(part) for part in (*path, wrong))
            expected = f"no setting '{dotted}'; did you mean '{field}'?"
            values = run.model_dump(mode="json")
            if path:  # a group at its default may be left out of the dump
                put(values, path, group.model_dump(mode="json"))
            put(values, (*path, wrong), 1)
            with pytest.raises(ConfigError) as in_file:
                parse(Run, values)
            told = ".".join([*by_name(run, path), wrong])
            assert (
                f"no setting '{told}'; did you mean '{field}'?" in str(in_file.value).splitlines()
            )
            with pytest.raises(ConfigError) as on_command_line:
                override(run, [f"{dotted}=1"])
            assert str(on_command_line.value) == expected
            tried += 1
    assert tried > 60


@pytest.mark.parametrize("name", RUNS)
def test_a_value_of_the_wrong_type_names_its_path_and_itself(name):
    run = get_recipe(name)
    tried = 0
    for leaf in leaves(run):
        if not isinstance(leaf.value, int | float) or len(leaf.path) > 5:
            continue
        if "instructions" in leaf.path:
            continue
        values = run.model_dump(mode="json")
        put(values, leaf.path, "many")
        with pytest.raises(ConfigError) as error:
            parse(Run, values)
        assert f"{'.'.join(by_name(run, leaf.path))} = 'many': must be" in str(error.value)
        tried += 1
    assert tried > 20


CASES = [
    ("model.pooling.kind=means", r"model\.pooling\.kind = 'means'.*did you mean 'mean'"),
    ("model.mask=both", "model.mask = 'both': must be 'bidirectional' or 'causal'"),
    ("model.pooling=mean", "model.pooling = 'mean': is a group of settings"),
    ("stages=3", r"stages = '3': is a list"),
    ("seed=4294967296", "seed = '4294967296': must be less than 4294967296"),
    ("seed=-1", "seed = '-1': must be greater than or equal to 0"),
    ("seed.x=3", "no setting 'seed.x': 'seed' is a single value"),
    ("stages.blen.steps=3", "no element 'stages.blen'; did you mean 'blend'"),
    ("stages.7.steps=3", "no element 'stages.7'; allowed: blend, retrieval"),
    ("evaluation.baselines.5=x", "no element 'evaluation.baselines.5'; allowed: 0, 1"),
    ("stages.blend.datasets=[a", "the value is not YAML"),
    ("stages.blend.datasets={a: 1, a: 2}", "the name 'a' is given twice"),
    ("stages.blend.steps", "expected path.to.setting=value"),
    ("=3", "expected path.to.setting=value"),
    ("stages.blend.steps=0", "must be greater than 0"),
    ("stages.blend.steps=1.5", "must be a valid integer"),
    ("placement.zero_stage=4", r"must be 0, 1, 2 or 3"),
    ("model.lora.target_modules=[]", "model.lora.target_modules"),
    ("stages.blend.optimizer.betas=[0.9, 1.0]", r"betas\.1 = '1.0': must be less than 1"),
    ("stages.blend.optimizer.betas=[0.9]", r"stages\.blend\.optimizer\.betas\.1' is required"),
    ("model.instruction_template=Query: ", "instruction_template: 'Query: ' lacks"),
    ("name=../elsewhere", "name = '../elsewhere'"),
    ("stages.blend.name=retrieval", "stages: two stages have the name 'retrieval'"),
    ("data.datasets.wiki-sentence.name=wiki-description", "data.datasets: two data sets have the"),
    ("data.datasets.wiki-sentence.name=a.b", r"name = 'a.b'"),
    ("stages.blend.datasets.wiki-sentenc=1", "data.datasets lacks; did you mean 'wiki-sentence'"),
    ("stages.blend.datasets={}", "at least 1 item"),
    (
        "stages.blend.optimizer.warmup_steps=25",
        "warmup_steps 25 must be below the 16 training steps",
    ),
    ("stages.blend.batch.num_negatives=0", "neither in-batch nor hard negatives"),
    ("placement.workers=4", "global_pairs 30 cannot be shared equally by placement.workers 4"),
    ("data.datasets.wiki-sentence.mining=null", "'wiki-sentence' has no negatives in stage 'ble"),
    ("data.datasets.wiki-sentence.mining.candidates=6", "num_negatives 7 exceeds candidates 6"),
    ("data.datasets.wiki-sentence.sample_share=0.5", "num_samples and sample_share both set the"),
    ("data.datasets.wiki-sentence.sample_share=1.5", "must be less than or equal to 1"),
    ("evaluation.own_sets.WikiSentenceRetrieval.name=WikiRelatednessSTS", "two own sets have"),
    ("evaluation.own_sets.WikiTopicClustering.experiments=0", "must be greater than 0"),
    ("model.instruction_template={task}{instruction}", "may have no braces except"),
    ("model.kind=biencoder", "setting 'model.backbone' is required"),
]


@pytest.mark.parametrize(("assignment", "message"), CASES, ids=[case[0] for case in CASES])
def test_a_setting_that_does_not_hold_says_why(assignment, message):
    with pytest.raises(ConfigError, match=message) as error:
        override(get_recipe("nvembed-quickstart"), [assignment])
    text = str(error.value)
    assert "pydantic" not in text.lower()
    assert len(text) < 500  # never a dump of a whole group


def test_in_batch_negatives_of_a_data_set_count_only_where_the_stage_has_them():
    run = get_recipe("biencoder")
    with pytest.raises(ConfigError, match="'pairs' has no negatives in stage 'finetune'"):
        override(run, ["data.datasets.pairs.in_batch_negatives=false"])
    with_given = ["data.datasets.pairs.source.negatives=negatives"]
    with pytest.raises(ConfigError, match="'pairs' has no negatives"):  # none are taken
        override(run, [*with_given, "data.datasets.pairs.in_batch_negatives=false"])
    taken = "stages.finetune.batch.num_negatives=3"
    override(run, [*with_given, taken, "data.datasets.pairs.in_batch_negatives=false"])


def test_a_group_without_its_kind_says_which_there_are():
    values = get_recipe("nvembed-quickstart").model_dump(mode="json")
    del values["model"]["pooling"]["kind"]
    with pytest.raises(ConfigError, match=r"'model\.pooling\.kind' is required; .*'latent_att"):
        parse(Run, values)


def test_all_wrong_settings_are_told_at_once():
    values = get_recipe("biencoder").model_dump(mode="json")
    values["seeed"] = 1
    values["stages"][0]["steps"] = -1
    del values["model"]["backbone"]["path"]
    with pytest.raises(ConfigError) as error:
        parse(Run, values)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert isinstance(pickle.loads(pickle.dumps(error.value)), ConfigError)


def test_negatives_that_no_data_set_has_are_refused():
    """Else they would be asked for, and training would go on without them."""
    run = get_recipe("biencoder")
    asked = "stages.finetune.batch.num_negatives=4"
    with pytest.raises(ConfigError, match="asks for 4 hard negatives of each query") as error:
        override(run, [asked])
    for fix in (
        "data.datasets.pairs.source.negatives=negatives",
        "data.datasets.pairs.mining.teacher=",
        "stages.finetune.batch.num_negatives=0",
    ):
        assert fix in str(error.value)
    for way in ("source.negatives=negatives", "mining.teacher=teacher"):
        assert override(run, [asked, f"data.datasets.pairs.{way}"]).stages[0].batch.num_negatives
    # One data set with negatives is enough: the others' rows are counted when they are read.
    blend = override(get_recipe("nvembed-quickstart"), ["stages.blend.batch.in_batch_negatives=1"])
    override(blend, ["data.datasets.wiki-sentence.mining=null"])


def test_nobody_is_asked_for_more_negatives_than_there_can_be():
    run = get_recipe("nvembed-quickstart")
    with pytest.raises(
        ConfigError, match=r"'wiki-topic\S*' draws only 7; raise data.datasets.wiki-topic"
    ):
        override(
            run,
            [
                "stages.blend.batch.num_negatives=8",
                "data.datasets.wiki-sentence.mining.num_negatives=8",
                "data.datasets.wiki-description.mining.num_negatives=8",
            ],
        )
    with pytest.raises(
        ConfigError, match=r"'wiki-\w+' mines only 7; raise .*mining\.num_negatives or"
    ):
        override(run, ["stages.blend.batch.num_negatives=8"])
    override(run, ["stages.blend.batch.num_negatives=7"])


def test_negatives_that_no_stage_takes_are_refused():
    """They would be mined, or read, for nothing."""
    run = get_recipe("biencoder")
    mining = "data.datasets.pairs.mining.teacher=teacher"
    with pytest.raises(
        ConfigError, match=r"pairs\.mining provides hard negatives.*num_negatives=7"
    ):
        override(run, [mining])
    with pytest.raises(ConfigError, match=r"num_negatives=3 \(it is 0\)"):
        override(run, [mining, "data.datasets.pairs.mining.num_negatives=3"])
    with pytest.raises(ConfigError, match=r"pairs\.source\.negatives provides .*\(finetune\)"):
        override(run, ["data.datasets.pairs.source.negatives=negatives"])
    taken = override(run, [mining, "stages.finetune.batch.num_negatives=7"])
    assert taken.stages[0].batch.num_negatives == 7


def test_negatives_that_one_of_the_stages_takes_are_used():
    """As in the quickstart: mined for stage 2, and the same data without them in stage 1."""
    run = get_recipe("nvembed-quickstart")
    mined = {d.name for d in run.data.datasets if d.mining is not None}
    assert run.stages[0].batch.num_negatives == 0
    assert mined & run.stages[0].datasets.keys() & run.stages[1].datasets.keys()
