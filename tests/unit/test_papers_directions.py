"""Claims of the papers: their runs, the order and time of what is measured, and verdicts."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from scipy.stats import ttest_rel

from rayembed.assets.resolver import resolve_model
from rayembed.display.tables import show
from rayembed.errors import ArtifactError, ConfigError, WorkerError
from rayembed.evaluation.tables import UNTRAINED, ScoreKey
from rayembed.models.loading.build import check_buildable
from rayembed.pipeline.run.report import Outcome
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed_papers import ablations
from rayembed_papers.directions import job, measure
from rayembed_papers.directions.catalogue import (
    directions,
    followed_up,
    get_directions,
    on_a_gpu,
)
from rayembed_papers.directions.measure import Results, differences, pairs_of, seeded, tasks_left
from rayembed_papers.directions.report import (
    finding,
    findings_plot,
    findings_table,
    notes_of,
)
from rayembed_papers.tables import encoder_rows, llm_rows

ALL = directions()


@pytest.fixture
def expected(monkeypatch):
    """Minutes of every run: as many as its architecture's name has letters."""
    monkeypatch.setattr(
        measure, "estimate", lambda run: SimpleNamespace(seconds=60.0 * len(run.model.kind))
    )


def trained(monkeypatch, scores):
    """Replace training: scores of a run by its fingerprint; the runs that were trained."""
    done = []

    def train(run):
        done.append(run.name)
        found = dict.fromkeys((t.name for t in run.evaluation.own_sets), scores(run))
        cut = dict.fromkeys(found, 0.01)
        last = run.stages[-1].name
        keys = {UNTRAINED: cut, ScoreKey(last): found, ScoreKey(last, dimension=256): cut}
        taken = {key: SimpleNamespace(scores=scores, items={}) for key, scores in keys.items()}
        return Outcome(run, taken, "model", "run", None, "http://mlflow", 0)

    monkeypatch.setattr(measure, "train", train)
    return done


def leaves(values, path=""):
    """Path of a setting → its value."""
    if isinstance(values, list) and values and all(isinstance(v, dict) for v in values):
        values = {value["name"]: value for value in values if "name" in value} or values
    if isinstance(values, dict):
        return {k: v for key, of in values.items() for k, v in leaves(of, f"{path}.{key}").items()}
    return {path: json.dumps(values, default=str)}


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.key)
def test_both_runs_of_a_claim_differ_in_what_it_is_about_alone(claim, tmp_path):
    ((better, worse),) = pairs_of(claim, [0], str(tmp_path))
    assert better.name != worse.name
    assert better.seed == worse.seed == 0
    assert better.evaluation.own_sets == worse.evaluation.own_sets
    assert {set_.name for set_ in better.evaluation.own_sets} >= set(claim.tasks)
    assert not better.evaluation.before_training
    # As many texts of as many pairs, unless stages or negatives are what it is about.
    steps = [sum(stage.steps for stage in run.stages) for run in (better, worse)]
    assert steps[0] == steps[1]
    one, other = (leaves(run.model_dump(mode="json")) for run in (better, worse))
    changed = {p for p in one.keys() | other.keys() if p != ".name" and one.get(p) != other.get(p)}
    unlike = {path for path in changed if not path.startswith(ABOUT[claim.key])}
    assert not unlike
    assert all(any(p.startswith(about) for p in changed) for about in ABOUT[claim.key])


_BOTH = ("description", "sentence")
_MINED = tuple(f".data.datasets.wiki-{name}.mining.rule." for name in _BOTH)
_CLUSTERED = (
    *(f".data.datasets.wiki-{name}.clusters" for name in _BOTH),
    ".stages.retrieval.batch.policy",
)
_CONTEXT = (  # a CDE, what it has that a bi-encoder lacks, and width, which it lacks
    *(".model.kind", ".model.encoder.path", ".model.num_context", ".model.context_positions"),
    *(".model.instruction_template", ".model.normalize_twice", ".model.num_soft_prompts"),
    *(".model.output", ".model.pool_context", ".model.pool_instruction", ".model.pooling.kind"),
    *(".model.projections", ".model.sequence_dropout", ".model.width"),
)
_EXAMPLES = (".evaluation.instructions.", ".model.examples")
_RATE = ("learning_rate", "pooling_learning_rate", "warmup_steps")

ABOUT = {
    "mask": (".model.mask",),
    "latent-mean": (".model.pooling.",),
    "mean-eos": (".model.pooling.kind",),
    "latent-self": (".model.pooling.",),
    "two-stages": (".stages.retrieval.", ".stages.blend.", ".stages.single."),
    "stage-order": tuple(
        f".stages.{stage}.optimizer.{name}" for stage in ("retrieval", "blend") for name in _RATE
    ),
    "in-batch": (".stages.single.batch.in_batch_negatives",),
    "examples": tuple(
        f".data.datasets.wiki-topic-{name}.source.label_form"
        for name in ("classification", "clustering")
    ),
    "positive-aware": _MINED,
    "synthetic": (".data.datasets.synthetic.", ".stages.retrieval.datasets.synthetic"),
    "moe": (".model.experts",),
    "moe-layers": (".model.experts.every",),
    "upcycled": (".model.experts.start",),
    "margin": _MINED,
    "negatives": (
        *(f".data.datasets.wiki-{name}.mining.num_negatives" for name in _BOTH),
        ".stages.finetune.batch.num_negatives",
    ),
    "filter": tuple(f".data.datasets.wiki-{name}.consistency" for name in _BOTH),
    "matryoshka": (".model.dimensions", ".stages.finetune.loss.dimensions"),
    "cross-lingual": (".stages.pretrain.datasets.en-es", ".stages.pretrain.datasets.en-fr"),
    "clusters": _CLUSTERED,
    "context": _CONTEXT,
    "context-clusters": _CONTEXT,
    "clusters-context": _CLUSTERED,
    "false-negatives": tuple(
        f".data.datasets.wiki-{name}.clusters.false_negative_margin" for name in _BOTH
    ),
    "dropout": (".model.sequence_dropout",),
    "contextual-token": (".model.encoder",),
    "concat": (".model.representation",),
    "concat-average": (".model.representation",),
    "concat-encoder": (".model.representation",),
    "one-token": (".model.num_contextual_tokens",),
    "tuned-encoder": (".model.encoder.frozen", ".model.encoder.lora"),
    "position": (".model.position",),
    "causal": (".model.mask",),
    "in-context": _EXAMPLES,
    "lengths": (
        *_EXAMPLES,
        *(".model.encoder", ".model.query_max_length", ".model.representation"),
    ),
}
"""Key of a claim → how paths of all settings begin in which its runs differ. Of two stages and one
each setting is on one side; stages in another order have each other's rates."""


@pytest.mark.assets
def test_every_claims_models_can_be_built():
    models = {}
    for claim in ALL:
        for run in (claim.better(), claim.worse()):
            models.setdefault(run.model.model_dump_json(), run.model)
    kinds = set()
    for model in models.values():
        folders = {name: resolve_model(at) for name, at in model.parts.items()}
        kinds.add(type(check_buildable(model, folders)).__name__)
    assert len(kinds) >= 5


def test_there_are_more_than_twenty_five_and_keys_are_checked():
    assert len({claim.key for claim in ALL}) == len(ALL) >= 25
    assert sum(bool(claim.note) for claim in ALL) == 23
    assert [one.key for one in get_directions(["mask", "moe"])] == ["mask", "moe"]
    assert get_directions([])[3].key == ALL[3].key
    with pytest.raises(ConfigError, match="no paper claim 'mas' to measure; did you mean 'mask'"):
        get_directions(["mas"])


def test_printed_differences_are_those_of_the_printed_tables():
    four, seven, eight, cde = (
        llm_rows.printed_nvembed_4(),
        encoder_rows.printed_nomic_7(),
        encoder_rows.printed_nomic_8(),
        encoder_rows.printed_cde_1(),
    )
    two, five, twelve = llm_rows.CAUSAL2VEC_2, llm_rows.CAUSAL2VEC_5, llm_rows.CAUSAL2VEC_12
    expected = {
        "two-stages": (four, "two stages", "single stage"),
        "stage-order": (four, "two stages", "reversed stages"),
        "in-batch": (four, "single stage", "single stage, in-batch"),
        "examples": (four, "two stages", "labels for documents"),
        "moe-layers": (seven, "every other layer, batch × 4", "every layer, batch × 4"),
        "margin": (
            *(eight, "Arctic Embed Large, margin 0.95, 4 negatives"),
            "Arctic Embed Large, margin none, 4 negatives",
        ),
        "negatives": (
            *(eight, "Stella 1.5B, margin 0.95, 10 negatives"),
            "Stella 1.5B, margin 0.95, 4 negatives",
        ),
        "clusters": (cde, "contextual batches", "neither"),
        "context": (cde, "contextual architecture", "neither"),
        "context-clusters": (cde, "both", "contextual batches"),
        "clusters-context": (cde, "both", "contextual architecture"),
        "contextual-token": (two, "Contextual token", "neither"),
        "concat": (two, "Contextual token and concatenation", "Contextual token"),
        "one-token": (
            *(five, "model.num_contextual_tokens=1"),
            "model.num_contextual_tokens=8",
        ),
        "concat-average": (twelve, "model.representation=concat", "model.representation=average"),
        "concat-encoder": (
            *(twelve, "model.representation=concat"),
            "model.representation=concat_encoder",
        ),
    }
    of_key = {one.key: one.printed for one in ALL}
    for key, (table, better, worse) in expected.items():
        column = next(iter(table[better]))  # the average, or the small LLM's
        difference = table[better][column] - table[worse][column]
        assert of_key[key] == pytest.approx(difference, abs=1e-9), key


def test_shorter_queries_without_examples_stand_against_longer_ones_with_them():
    (claim,) = get_directions(["lengths"])
    short, long = claim.better(), claim.worse()
    assert short.model.encoder is not None
    assert short.model.examples is None
    assert long.model.encoder is None
    assert long.model.representation == "eos"
    lengths = [run.model.query_max_length for run in (short, long)]
    assert lengths[1] == lengths[0] + long.model.examples.max_tokens
    assert lengths[1] > 3 * lengths[0]
    assert short.model.document_max_length == long.model.document_max_length
    without, with_them = (run.evaluation.instructions for run in (short, long))
    for task in ablations.EXAMPLES:
        assert without[task] in with_them[task]
        assert len(with_them[task]) > 2 * len(without[task])


def test_a_runs_name_is_of_its_settings_and_seed(tmp_path):
    run = ALL[0].better()
    first, other = seeded(run, 0, str(tmp_path)), seeded(run, 1, str(tmp_path))
    assert first.name != other.name
    assert first.name.rpartition("-")[0] == other.name.rpartition("-")[0]
    assert seeded(run, 0, str(tmp_path / "elsewhere")).name == first.name
    assert seeded(ALL[1].better(), 0, str(tmp_path)).name == first.name, "claims share their base"


def test_what_is_measured_is_what_the_claims_ask_for(tmp_path):
    causes = [followed_up(claim, cause) for claim in ALL for cause in claim.causes]
    pairs = [pair for one in (*ALL, *causes) for pair in pairs_of(one, range(3), str(tmp_path))]
    asked = {run.name: run.fingerprint for pair in pairs for run in pair}
    files = sorted((Path(__file__).parents[2] / "docs" / "measured" / "papers").glob("*.json"))
    assert files
    for file in files:
        assert json.loads(file.read_text())["fingerprint"] == asked[file.stem]


def test_each_run_is_measured_once_and_cheap_claims_come_first(expected, tmp_path, monkeypatch):
    results = Results(str(tmp_path))
    claims = get_directions(["mask", "latent-mean", "filter"])
    tasks = tasks_left(claims, [0, 1], results)
    assert [task.run.model.kind for task in tasks] == ["nvembed"] * 6 + ["biencoder"] * 4
    assert len({task.run.name for task in tasks}) == len(tasks), "the base is shared"
    done = trained(monkeypatch, lambda run: 0.5)
    assert job._measured(tasks[:3], results, None, {}) == 0
    assert done == [task.run.name for task in tasks[:3]]
    kept = json.loads((tmp_path / measure.FOLDER / f"{done[0]}.json").read_text())
    assert kept["fingerprint"] == tasks[0].run.fingerprint
    assert kept["seed"] == tasks[0].run.seed
    assert kept["command"].endswith(f"--only {tasks[0].claim} --seeds 2")
    assert not kept["was_there"]
    left = tasks_left(claims, [0, 1], Results(str(tmp_path)))
    assert [task.run.name for task in left] == [task.run.name for task in tasks[3:]]
    (tmp_path / measure.FOLDER / f"{done[0]}.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"is damaged .*; remove it"):
        tasks_left(claims, [0, 1], Results(str(tmp_path)))


def test_no_run_begins_that_would_end_too_late(expected, tmp_path, monkeypatch):
    results = Results(str(tmp_path))
    tasks = tasks_left(get_directions(["filter", "moe"]), [0], results)
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(job.time, "monotonic", lambda: float(next(clock)))
    done = trained(monkeypatch, lambda run: 0.5)
    assert job._measured(tasks, results, 800.0, {}) == len(tasks) - len(done)
    assert 0 < len(done) < len(tasks)


def test_verdicts_and_causes_are_told_of_paired_scores(expected, tmp_path, monkeypatch, capsys):
    by_seed = {0: 0.30, 1: 0.36, 2: 0.45}
    bidirectional = {seed: score + 0.01 + 0.001 * seed for seed, score in by_seed.items()}

    def scores(run):
        return (by_seed if run.model.mask == "causal" else bidirectional)[run.seed]

    trained(monkeypatch, scores)
    arguments = ["--only", "mask", "--only", "latent-mean", "--storage-path", str(tmp_path)]
    monkeypatch.setattr(job, "_track", lambda *_: None)
    assert job.run_directions(arguments) == 0
    told = (tmp_path / "papers" / "directions-3-seeds.md").read_text()
    low, high = ttest_rel(
        list(bidirectional.values()), list(by_seed.values())
    ).confidence_interval()
    assert f"+1.10 ± {100 * (high - low) / 2:.2f} (3 of 3) | holds |" in told
    assert "+0.00 ± 0.00 (0 of 3) | undecided |" in told
    assert "likely cause" not in told
    assert (tmp_path / "papers" / "directions-3-seeds.png").read_bytes().startswith(b"\x89PNG")
    by_seed, bidirectional = bidirectional, by_seed
    for file in (tmp_path / measure.FOLDER).iterdir():
        file.unlink()
    assert job.run_directions([*arguments, "--seeds", "2"]) == 0
    turned = (tmp_path / "papers" / "directions-2-seeds.md").read_text()
    assert "| reversed |" in turned
    assert "bidirectional > causal attention, six layers" in turned
    assert "Report" in capsys.readouterr().out


def kept(results, run, score, **told):
    """A result's file, as a machine would write it."""
    path = Path(results.path(run))
    path.parent.mkdir(parents=True, exist_ok=True)
    scores = dict.fromkeys((one.name for one in run.evaluation.own_sets), score)
    packages = {"packages": {"torch": told.pop("torch", "2")}}
    told = {"machine": "this", "bfloat16": True, "provenance": packages, **told}
    path.write_text(json.dumps({"scores": scores, **told}))


def test_only_scores_of_one_kind_of_machine_are_compared(tmp_path, caplog):
    results = Results(str(tmp_path))
    (claim,) = get_directions(["filter"])
    told = [
        ({}, {}),
        ({}, {"bfloat16": False}),
        ({}, {"machine": "another"}),
        ({"torch": "3"}, {"torch": "3"}),
        ({}, {"torch": "3"}),
    ]
    for pair, how in zip(pairs_of(claim, range(5), str(tmp_path)), told, strict=True):
        for run, score, one in zip(pair, (0.5, 0.25), how, strict=True):
            kept(results, run, score, **one)
    assert differences(claim, range(5), results) == {0: (0.5, 0.25), 3: (0.5, 0.25)}
    assert caplog.text.count("measured on different machines") == 3


def test_what_another_machine_has_measured_is_measured_here_where_its_other_side_is_not(
    expected, tmp_path, monkeypatch
):
    here = measure.MeasuredRun({}, "this", True, "2")
    monkeypatch.setattr(measure, "_here", lambda run: here)
    results = Results(str(tmp_path))
    (claim,) = get_directions(["filter"])
    pairs = pairs_of(claim, range(4), str(tmp_path))
    for run in pairs[0]:  # both elsewhere: they are compared
        kept(results, run, 0.5, machine="another")
    kept(results, pairs[1][0], 0.5, machine="another")  # the other side is missing
    kept(results, pairs[2][0], 0.5)
    kept(results, pairs[3][0], 0.5, torch="1")
    kept(results, pairs[3][1], 0.5)
    left = [task.run.name for task in tasks_left([claim], range(4), results)]
    assert left == [pairs[1][0].name, pairs[1][1].name, pairs[2][1].name, pairs[3][0].name]


def test_a_claim_is_followed_up_when_all_its_seeds_are_there():
    (claim,) = get_directions(["mask"])
    two = {0: (0.1, 0.2), 1: (0.1, 0.2001)}
    assert finding(claim, two, 2).verdict == "reversed"
    assert len(job._followed_up([finding(claim, two, 2)])) == len(claim.causes)
    assert finding(claim, two, 3).verdict == "undecided: 2 of 3 seeds"
    assert job._followed_up([finding(claim, two, 3)]) == []


def test_the_runs_that_follow_a_reversal_are_in_the_plan(expected, tmp_path, capsys):
    (claim,) = get_directions(["mask"])
    results = Results(str(tmp_path))
    for number, pair in enumerate(pairs_of(claim, [0, 1], str(tmp_path))):
        for run, score in zip(pair, (0.1, 0.2 + 0.001 * number), strict=True):
            kept(results, run, score)
    arguments = ["--only", "mask", "--storage-path", str(tmp_path), "--dry-run"]
    assert job.run_directions([*arguments, "--seeds", "2"]) == 0
    told = capsys.readouterr().out
    assert f"{4 * len(claim.causes)} runs" in told
    causes = [followed_up(claim, cause) for cause in claim.causes]
    named = {
        run.name for one in causes for pair in pairs_of(one, [0, 1], "outputs") for run in pair
    }
    assert set(re.findall(r"papers-\w+-\d", told)) == named


def test_the_table_of_the_docs_is_that_of_the_kept_results(tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    results = Results(str(tmp_path))
    shutil.copytree(docs / "measured" / "papers", tmp_path / measure.FOLDER)

    def found(claims):
        some = (finding(claim, differences(claim, range(3), results), 3) for claim in claims)
        return [one for one in some if one.apart is not None and one.apart.number == 3]

    told, page = found(ALL), (docs / "measured" / "directions.md").read_text()
    assert show(findings_table(told, ""), "markdown") in page
    assert notes_of(told) in page
    assert "](directions.png)" in page
    for cause in found(job._followed_up(told)):
        (_, row) = show(findings_table([cause], ""), "markdown").strip().rsplit("\n", 1)
        assert row in page


def test_mlflow_has_differences_intervals_and_verdicts(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    first, second, _ = (finding(one, {}, 2) for one in ALL[:3])
    found = [finding(first.direction, {0: (0.2, 0.1), 1: (0.3, 0.19)}, 2), second]
    report = tmp_path / "directions-2-seeds.md"
    report.write_text("the tables")
    for _ in range(2):  # the same report, told again
        job._track("directions-2-seeds", [report], found, str(tmp_path))
    client = MlflowClient(resolve_tracking_uri(None, str(tmp_path)))
    (run,) = client.search_runs([client.get_experiment_by_name("rayembed").experiment_id])
    key, low = first.direction.key, ttest_rel([0.2, 0.3], [0.1, 0.19]).confidence_interval().low
    assert run.data.metrics[f"difference/{key}"] == pytest.approx(0.105)
    assert run.data.metrics[f"half_width/{key}"] == pytest.approx(0.105 - low)
    assert run.data.tags[f"verdict.{key}"] == "holds"
    assert run.data.tags[f"verdict.{second.direction.key}"] == "not measured"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == [report.name]
    assert run.info.status == "FINISHED"


def test_a_claim_that_something_costs_nothing_allows_half_a_point():
    claim = next(one for one in ALL if one.costs_nothing)
    near = {seed: (0.5 + 0.0001 * seed, 0.503) for seed in range(3)}
    assert finding(claim, near, 3).verdict == "holds"
    far = {seed: (0.5 + 0.0001 * seed, 0.52) for seed in range(3)}
    assert finding(claim, far, 3).verdict == "reversed"
    assert finding(claim, {0: (0.5, 0.5)}, 1).verdict == "undecided: one seed"
    assert finding(claim, {}, 3).verdict == "not measured"


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.key)
def test_every_cause_can_be_looked_at(claim, tmp_path):
    assert claim.causes
    for cause in claim.causes:
        ((better, worse),) = pairs_of(followed_up(claim, cause), [0], str(tmp_path))
        assert better.name != worse.name


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.key)
def test_the_same_claims_at_a_larger_size(claim, tmp_path):
    ((small, other),) = pairs_of(claim, [0], str(tmp_path))
    larger = on_a_gpu(claim)
    ((whole, worse),) = pairs_of(larger, [0], str(tmp_path))
    assert whole.placement.use_gpu
    assert worse.placement.use_gpu
    assert whole.model.backbone.num_layers is None
    assert sum(s.steps for s in whole.stages) == 5 * sum(s.steps for s in small.stages)
    assert sum(s.steps for s in worse.stages) == 5 * sum(s.steps for s in other.stages)
    assert len({small.name, other.name, whole.name, worse.name}) == 4
    assert larger.causes


def test_the_larger_size_is_asked_for_by_an_option(expected, tmp_path, capsys):
    arguments = ["--only", "mask", "--seeds", "1", "--storage-path", str(tmp_path), "--dry-run"]
    assert job.run_directions([*arguments, "--on-a-gpu"]) == 0
    larger = capsys.readouterr().out
    assert job.run_directions(arguments) == 0
    assert "2 runs" in larger
    names = set(re.findall(r"papers-\w+-0", larger))
    assert len(names) == 2
    assert not names & set(re.findall(r"papers-\w+-0", capsys.readouterr().out))


def test_a_run_that_fails_stops_no_other(expected, tmp_path, monkeypatch, capsys):
    def train(run):
        raise WorkerError("no memory")

    monkeypatch.setattr(measure, "train", train)
    monkeypatch.setattr(job, "_track", lambda *_: None)
    assert job.run_directions(["--only", "filter", "--storage-path", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "6 runs failed" in told.err
    assert (tmp_path / "papers" / "directions-3-seeds.md").exists()


def test_tables_and_plots_of_nothing(tmp_path):
    found = [finding(claim, {}, 3) for claim in ALL]
    table = show(findings_table(found, "title"), "markdown")
    assert table.count("not measured") == len(ALL)
    findings_plot(found, tmp_path / "empty.png")
    cause = ALL[0].causes[0]
    longer = followed_up(ALL[0], cause)
    steps = [sum(s.steps for s in one.better().stages) for one in (ALL[0], longer)]
    assert steps[1] == 3 * steps[0]
    assert differences(longer, [0], Results(str(tmp_path))) == {}
