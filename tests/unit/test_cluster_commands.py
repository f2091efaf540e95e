"""The commands of the guides: every training job in them is a run, every file is there."""

import re
import shlex

import pytest
import yaml
from cluster_files import CLUSTER, FILLED, ROOT, readme_commands

from rayembed.errors import ConfigError
from rayembed.pipeline import (
    adaptation_job,
    compare_job,
    data_jobs,
    evaluation_job,
    register_job,
    serve_job,
    sweep_job,
    synthesis_job,
)
from rayembed.pipeline.command_line import Action, resolve
from rayembed.pipeline.evaluation_job import asked_run
from rayembed_papers.backbone import job as backbone_job
from rayembed_papers.context import job as context_job
from rayembed_papers.noise import job as noise_job
from rayembed_papers.published import job as papers_job
from rayembed_papers.tables.catalogue import table_sweeps

OWN_TEST = ROOT / "docs" / "own_architecture.md"  # whose recipe is only there after its changes
GUIDES = sorted(
    {*CLUSTER.rglob("README.md"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"} - {OWN_TEST}
)
JOBS = {"train_nvembed": "nvembed-quickstart", "train_biencoder": "biencoder"}


def jobs_of(path):
    """(script, arguments) of each job that a guide's commands start."""
    for line in readme_commands(path):
        found = re.search(r"jobs/([\w/]+)\.py (.*)", line)
        sbatch = re.search(r"^sbatch .*train\.sbatch (.*)", line)
        if found:
            words = shlex.split(found[2].partition(" > ")[0].partition(" # ")[0], comments=True)
            yield found[1], [_filled(word) for word in words]
        elif sbatch:
            yield "train_nvembed", [_filled(word) for word in shlex.split(sbatch[1])]


def _filled(word):
    filled = re.sub(r"\$\{?([A-Z_]+)\}?", lambda m: FILLED.get(m[1], "/somewhere"), word)
    return filled.replace("…", "hf://org/name")


ALL = [
    pytest.param(script, words, id=f"{guide.relative_to(ROOT)}-{number}")
    for guide in GUIDES
    for number, (script, words) in enumerate(jobs_of(guide))
]


def test_the_guides_of_the_cluster_all_train():
    trained = {
        p.id.rpartition("-")[0]
        for p in ALL
        if p.values[0].startswith("train_") and "--dry-run" not in p.values[1]
    }
    assert {f"cluster/{n}/README.md" for n in ("docker", "kuberay", "ray_up", "slurm")} <= trained
    assert "docs/getting_started.md" in trained


READERS = {
    "evaluate_model": lambda words: asked_run(evaluation_job._parser("").parse_args(words)),
    "serve_model": serve_job.resolve,
    "register_model": register_job.resolve,
    "compare_models": lambda words: compare_job.comparison_parser("").parse_args(words),
    "synthesize_pairs": lambda words: synthesis_job._parser("").parse_args(words),
    "adapt_encoder": lambda words: adaptation_job.resolve(words, "nomic-adapt-quickstart"),
    "papers/compare_with_papers": lambda words: papers_job._parser("").parse_args(words),
    "papers/evaluate_backbone": lambda words: backbone_job.asked_run(
        backbone_job._parser("").parse_args(words)
    ),
    "papers/analyse_context": lambda words: context_job._parser("").parse_args(words),
    "papers/sweep_tables": lambda words: (
        words == ["--list"] or sweep_job.parse_arguments(words, table_sweeps())
    ),
    "sweep_recipe": sweep_job.parse_arguments,
    "set_corpus": list,
    "papers/measure_noise": lambda words: noise_job._parser("").parse_args(words),
}
"""What jobs make of their arguments before they start anything; `list` only takes them."""


def read(script, words):
    """What a job makes of its arguments."""
    until = re.search(r'until="(\w+)"', (ROOT / "jobs" / f"{script}.py").read_text())
    if until:
        return data_jobs.resolve(words, until[1])
    if script.startswith("train_"):
        default = JOBS.get(script, f"{script.removeprefix('train_')}-quickstart")
        run, action = resolve(words, default)
        assert action in Action
        return run
    return READERS[script](words)


@pytest.mark.parametrize(("script", "words"), ALL)
def test_a_job_of_a_guide_is_asked_rightly(script, words):
    assert read(script, words)


def test_a_misspelt_setting_of_a_guide_would_be_seen():
    with pytest.raises(ConfigError, match="did you mean 'workers'"):
        resolve(["--set", "placement.worker=8"], "nvembed-quickstart")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_guide_names_are_there(guide):
    commands = " ".join(readme_commands(guide))
    named = set(re.findall(r"(?<![\w/])(?:cluster|jobs|benchmarks)/[\w./]+\.\w+", commands))
    links = set(re.findall(r"\]\((?!https?://|#)([^)#]+)", guide.read_text()))
    missing = {n for n in named if not (ROOT / n).is_file()}
    missing |= {link for link in links if not (guide.parent / link).exists()}
    assert missing == set()


def test_the_runtime_environment_is_one_that_ray_takes():
    from ray.runtime_env import RuntimeEnv

    values = yaml.safe_load((CLUSTER / "runtime_env.yaml").read_text())
    assert RuntimeEnv(**values).to_dict() == values
    for module in values["py_modules"]:
        assert (ROOT / module / "__init__.py").is_file()
    assert all(pattern.startswith("/") for pattern in values["excludes"])
    assert not any(re.search("TOKEN|KEY|PASSW|SECRET", name) for name in values["env_vars"])
    with pytest.raises(TypeError, match="env_vars"):
        RuntimeEnv(**values | {"env_vars": {"TQDM_DISABLE": 1}})


def test_tests_that_the_guide_of_security_names_are_there():
    text = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(?:tests/(?:unit|jobs)/)?(test_[\w*]+\.py)`", text))
    assert len(named) > 8
    assert {name for name in named if not list((ROOT / "tests").rglob(name))} == set()
