"""What holds for a run holds for the runs of a sweep: credentials, idle settings, device, type."""

import logging

import pytest
import ray
from own_pairs import own_run

from rayembed import errors
from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.machine import gpu_check_on_ray
from rayembed.machine.hardware import Precision
from rayembed.pipeline.run.on_ray import OnRay
from rayembed.recipes.catalogue import get_recipe
from rayembed_extras.sweeps import sweep as pipeline_sweep
from rayembed_extras.sweeps.folder import sweep_as_begun, sweep_settled
from rayembed_extras.sweeps.job import sweep_job
from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.space import apply, parse_space
from rayembed_extras.sweeps.trials import check_sweep, data_folders, known_trials


@pytest.fixture
def cluster(monkeypatch):
    """A cluster whose live nodes have these resources."""

    def of(*nodes):
        live = [{"Alive": True, "NodeID": str(i), "Resources": n} for i, n in enumerate(nodes)]
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "nodes", lambda: live)
        monkeypatch.setattr(gpu_check_on_ray, "gpu_problems", lambda gpu=None: {})
        runtime = OnRay()
        runtime.start = lambda: None
        return runtime

    return of


POLICY = "stages.retrieval.batch.policy"


def here(_):
    """What a runtime answers on a machine that emulates bfloat16."""
    return Precision("float32", "this CPU emulates bfloat16 (9 times slower)")


def elsewhere(_):
    """What a runtime answers on another machine."""
    return Precision("bfloat16", "this CPU has units for it (2.4 times float32)")


PATH = "data.datasets.wiki-description.source.path"


@pytest.mark.parametrize(
    "entry",
    [
        "grid(a.jsonl, s3://KEYID:hunter2@bucket/x)",
        "choice([a.jsonl, s3://KEYID:hunter2@bucket/x], b.jsonl)",
        "choice({kind: beir, path: 's3://KEYID:hunter2@bucket/x'}, null)",
        ["a.jsonl", "https://host/file?access_token=hunter2"],
        # What is wrong with these is told first, and does not repeat the address either.
        "grid(s3://KEYID:hunter2@bucket/x",
        "grid(s3://KEYID:hunter2@bucket/x, )",
        "grid(s3://KEYID:hunter2@bucket/x, s3://KEYID:hunter2@bucket/x)",
        "grit(s3://KEYID:hunter2@bucket/x)",
        "integers(s3://KEYID:hunter2@bucket/x, 3)",
    ],
)
def test_a_password_in_a_search_space_is_refused_and_not_repeated(entry):
    with pytest.raises(ConfigError, match="wiki-description") as error:
        parse_space({PATH: entry})
    assert "hunter2" not in str(error.value)
    assert "KEYID" not in str(error.value)


def test_a_space_of_addresses_without_passwords_is_searched():
    entry = "grid([s3://bucket/a, hf://org/name@main], {path: http://host:9000/a@b})"
    assert len(parse_space({PATH: entry})[PATH].values) == 2


@pytest.mark.parametrize(
    "values",
    [
        {PATH: "s3://KEYID:hunter2@bucket/x"},
        {"evaluation.baselines": "[bm25, s3://KEYID:hunter2@bucket/x]"},
        {"evaluation.baselines": "[bm25, s3://KEYID:hunter2@bucket/x"},
    ],
)
def test_a_combination_that_cannot_be_does_not_repeat_a_password(values):
    with pytest.raises(ConfigError, match="contains an invalid run") as error:
        apply(get_recipe("nvembed-quickstart"), {"seed": "3", **values})
    assert "hunter2" not in str(error.value)
    assert "seed=3" in str(error.value)


def test_a_sweep_over_the_policy_has_trials_with_clusters_and_without() -> None:
    for base in ("clustered", "homogeneous"):
        words = ["--recipe", "cde-quickstart", "--set", f"{POLICY}={base}"]
        grid = ["--set", f"{POLICY}=grid(clustered, homogeneous)"]
        sweep = sweep_job().resolve([*words, *grid])[0].sweep
        check_sweep(sweep)
        trials = {trial.values[POLICY]: trial.run for trial in known_trials(sweep)}
        made = {
            policy: any(dataset.clusters is not None for dataset in run.data.datasets)
            for policy, run in trials.items()
        }
        assert made == {"clustered": True, "homogeneous": False}


def test_a_sweep_settles_the_device_of_all_its_runs(cluster, monkeypatch, tmp_path):
    runtime = cluster({"CPU": 8.0, "GPU": 1.0})
    monkeypatch.setattr(pipeline_sweep, "OnRay", lambda: runtime)
    for name in ("check_placement_now", "check_dashboard", "trials_at_once"):
        monkeypatch.setattr(pipeline_sweep, name, lambda *_, **__: None)
    monkeypatch.setattr(pipeline_sweep, "free_nodes", list)
    monkeypatch.setattr(pipeline_sweep, "sweep_settled", lambda sweep, _: sweep)
    run = own_run(tmp_path)
    sweep = pipeline_sweep._settled(Sweep(name="s", runs={"a": run}, space={"seed": ("1", "2")}))
    assert [one.placement.use_gpu for one in sweep.runs.values()] == [True]


def test_a_sweep_goes_on_in_the_type_that_it_began_with(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "rayembed.pipeline.checks.precision")
    run = get_recipe("biencoder")
    fixed = override(run, ["model.backbone.dtype=bfloat16"])
    sweep = Sweep(name="s", runs={"a": run, "b": run, "c": fixed}, space={"seed": ("0", "1")})
    begun = sweep_settled(sweep, here)
    assert _types(begun) == ["float32", "float32", "bfloat16"]
    assert len(caplog.records) == 2, "each type is told once"
    again = sweep_as_begun(sweep, begun)
    assert again.fingerprint == begun.fingerprint
    assert sweep_settled(again, elsewhere) == again
    assert _types(sweep_settled(sweep, elsewhere)) == ["bfloat16"] * 3


def _types(sweep: Sweep) -> list[str]:
    return [run.model.backbone.dtype for run in sweep.runs.values()]


def test_a_held_out_part_of_another_size_is_other_data(tmp_path):
    run = own_run(tmp_path)
    other = override(run, ["data.datasets.pairs.held_out.share=0.2"])
    assert other.fingerprint != run.fingerprint
    assert data_folders(other) != data_folders(run)


def test_a_sweep_without_its_extra_is_refused_before_work(monkeypatch):
    found = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "optuna" else found(name))
    with pytest.raises(ConfigError, match=r"a sweep needs optuna.*'\.\[sweeps\]'"):
        check_sweep(None)
