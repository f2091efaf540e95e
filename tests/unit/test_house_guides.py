"""The commands of the guides: every training job in them is a run, every file is there."""

import os
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from cluster_files import CLUSTER, FILLED, ROOT, documents, fenced, readme_commands

from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.jobs.table import JOBS
from rayembed.pipeline.job import Job
from rayembed.pipeline.run.training_job import training_job
from rayembed_extras.adaptation.settings import CorpusConfig

OWN_TESTS = {  # whose kinds are only there after their changes
    ROOT / "docs" / "own_architecture.md",
    ROOT / "docs" / "own_job.md",
    ROOT / "docs" / "own_loss.md",
}
GUIDES = sorted(
    {*CLUSTER.rglob("README.md"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"} - OWN_TESTS
)


@pytest.mark.parametrize("guide", ["README.md", "slurm/README.md", "ray_up/README.md"])
def test_guides_of_hosts_say_how_nccl_gets_the_right_interface(guide):
    """Pods have one; hosts have those of bridges and of VPNs, too."""
    text = (CLUSTER / guide).read_text()
    assert re.search(r"NCCL_SOCKET_IFNAME=\w+", text)


def jobs_of(path):
    """(script, arguments) of each job that a guide's commands start."""
    for command in readme_commands(path):
        alone = command.startswith("--set ")
        line = f"rayembed train --pairs pairs.jsonl {command}" if alone else command
        found = re.search(r"(?:jobs/|^rayembed (?=[a-z]))([\w/-]+)(?:\.py)?(?: (.*)|$)", line)
        sbatch = re.search(r"^sbatch .*train\.sbatch (.*)", line)
        if found:
            words = (found[2] or "").partition(" > ")[0].partition(" # ")[0]
            words = shlex.split(words, comments=True)
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
        if p.values[0].startswith("train") and "--dry-run" not in p.values[1]
    }
    assert {f"cluster/{n}/README.md" for n in ("docker", "kuberay", "ray_up", "slurm")} <= trained
    assert "docs/getting_started.md" in trained


@pytest.fixture
def read(monkeypatch):
    """A function that gives what a job's script makes of its arguments, before it does anything."""
    called = []
    monkeypatch.setattr(
        Job, "__call__", lambda job, argv, about=None, prog=None: called.append((job, argv)) or 0
    )

    def read(script, words):
        monkeypatch.setattr("sys.argv", [script, *words])
        path = ROOT / "jobs" / f"{script}.py"
        if path.is_file():
            with pytest.raises(SystemExit):
                runpy.run_path(str(path), run_name="__main__")
        else:  # a name of the command `rayembed`
            assert JOBS.get(script)(words) == 0
        job, argv = called.pop()
        return job.arguments(argv) if "--list" in argv else job.resolve(argv)[0]

    return read


@pytest.mark.parametrize(("script", "words"), ALL)
def test_a_job_of_a_guide_is_asked_rightly(read, script, words):
    assert read(script, words)


QUICKSTARTS = {"": "nvembed", "causal2vec-": "causal2vec", "cde-": "cde", "nomic-": "nomic"}
"""Beginnings of the names of make's targets, and their architectures."""


@pytest.mark.parametrize(("begins", "family"), QUICKSTARTS.items())
@pytest.mark.parametrize(("more", "runtime"), [([], "ray"), (["RUNTIME=local"], "local")])
def test_a_quickstart_trains_its_recipe_on_ray_unless_it_shall_not(
    read, begins, family, more, runtime
):
    target = f"{begins}quickstart"
    command = ["make", "-n", "--no-print-directory", target, "ARGS=--set seed=7", *more]
    # `make test` gives what it was called with on to every make below it.
    environment = {**os.environ, "MAKEFLAGS": ""}
    told = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    python, script, *words = shlex.split(told.splitlines()[-1])
    assert (python, script) == (".venv/bin/python", f"jobs/train_{family}.py")
    run = read(Path(script).stem, words)
    assert (run.name, run.seed) == (f"{family}-quickstart", 7)
    assert run.placement.runtime == runtime
    assert run.placement.storage_path == "outputs", "of the checkout, in which make runs it"


def test_a_misspelt_setting_of_a_guide_would_be_seen():
    with pytest.raises(ConfigError, match="did you mean 'workers'"):
        training_job("nvembed-quickstart").resolve(["--set", "placement.worker=8"])


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_guide_names_are_there(guide):
    commands = " ".join(readme_commands(guide))
    named = set(re.findall(r"(?<![\w/])(?:cluster|jobs|benchmarks)/[\w./]+\.\w+", commands))
    links = set(re.findall(r"\]\((?!https?://|#)([^)#]+)", guide.read_text()))
    missing = {n for n in named if not (ROOT / n).is_file()}
    missing |= {link for link in links if not (guide.parent / link).exists()}
    assert missing == set()


def test_targets_of_make_and_extras_in_guides_are_there():
    """A command that no test starts names at least what there is."""
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    extras = set(tomllib.loads(project)["project"]["optional-dependencies"])
    pages = {*GUIDES, *OWN_TESTS, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"}
    commands = [line.partition(" #")[0] for page in pages for line in readme_commands(page)]
    text = "\n".join(commands)
    made = set(re.findall(r"^make ([a-z][\w-]*)", text, re.MULTILINE))
    assert {"quickstart", "docs", "papers"} <= made <= targets
    installed = re.findall(r"(?:rayembed|\.)\[([\w,-]+)\]", text)
    assert {"serving", "compress"} <= set(",".join(installed).split(",")) <= extras


YAML = [
    pytest.param(text, id=guide.stem)
    for guide in GUIDES
    for language, text in fenced(guide)
    if language == "yaml"
]


@pytest.mark.parametrize("text", YAML)
def test_a_job_reads_the_yaml_of_a_guide(read, text, tmp_path):
    """A whole file, or the settings of one job's texts."""
    values = yaml.safe_load(text)
    if set(values) == {"corpus"}:
        assert parse(CorpusConfig, values["corpus"])
        return
    file = tmp_path / "given.yaml"
    file.write_text(text)
    if "runs" in values:
        assert read("sweep", ["--sweep", str(file)]).sweep.name == values["name"]
    else:
        asked = read("train" if "model" in values else "prepare", ["--recipe", str(file)])
        assert getattr(asked, "run", asked).name == values["name"]


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


def test_the_job_of_the_manifest_is_a_run_that_fits_its_nodes():
    job = next(
        document["spec"]
        for path in sorted((CLUSTER / "kuberay").glob("*.yaml"))
        for document in documents(path)
        if document["kind"] == "RayJob"
    )
    words = shlex.split(job["entrypoint"])
    assert words[:2] == ["python", "/opt/rayembed/jobs/train_nvembed.py"]
    run, _ = training_job("nvembed-quickstart").resolve(words[2:])
    placement = run.placement
    assert (placement.use_gpu, placement.storage_path) == (True, FILLED["STORAGE"])
    assert placement.wait_for_nodes_seconds > 0, "the cluster begins without nodes"
    assert placement.wait_for_nodes_seconds < job["preRunningDeadlineSeconds"]
    gpu = job["rayClusterSpec"]["workerGroupSpecs"][-1]
    limits = gpu["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert placement.workers % limits["nvidia.com/gpu"] == 0
    per_node = min(placement.workers, limits["nvidia.com/gpu"])
    assert per_node * placement.cpus_per_worker <= int(limits["cpu"])
    environment = yaml.safe_load((CLUSTER / "runtime_env.yaml").read_text())["env_vars"]
    assert yaml.safe_load(job["runtimeEnvYAML"]) == {"env_vars": environment}
