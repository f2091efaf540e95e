"""The Dockerfile as far as it can be read without Docker."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from cluster_files import CLUSTER, ROOT
from dockerfile_parse import DockerfileParser
from dockerfile_rules import dockerfile_problems, ignored

from rayembed.pipeline.run.on_ray import RAY_SETTINGS

DOCKERFILE = CLUSTER / "docker" / "Dockerfile"
RULES = (CLUSTER / "docker" / "Dockerfile.dockerignore").read_text()
CONSTRAINTS = dict(
    line.split("==") for line in (CLUSTER / "constraints.txt").read_text().split() if "==" in line
)


def test_stages_pins_user_sources():
    assert dockerfile_problems(DOCKERFILE, ROOT) == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("USER 1000:1000", "USER root", "runs as 'root'"),
        ("USER 1000:1000", "USER ray", "runs as 'ray'"),
        ("USER 1000:1000\n", "", "runs as 'root'"),
        ("python:3.11.14-slim-bookworm", "python:latest", "'python:latest' is not pinned"),
        ("python:3.11.14-slim-bookworm", "python", "'python' is not pinned"),
        ("--from=build ", "--from=builder ", "no stage 'builder'"),
        ("COPY platform platform", "COPY platforms platform", "no 'platforms' to copy"),
        ("COPY platform platform", "ADD https://example.org/x platform", "ADD fetches"),
        ("pip install -c cluster/constraints.txt boto3", "pip install boto3", "any version"),
        (" --no-install-recommends", "", "nobody asked for"),
        ("ARG COMMIT=", "ARG HF_TOKEN=", "HF_TOKEN would stay"),
        ("    HOME=/home/ray", "    AWS_SECRET_ACCESS_KEY=x", "AWS_SECRET_ACCESS_KEY would stay"),
        ('CMD ["bash"]', 'ENTRYPOINT ["ray"]', "ENTRYPOINT"),
        ("FROM ${PYTHON_IMAGE} AS runtime", "", "stays in the image"),
    ],
)
def test_a_damaged_file_is_refused(before, after, problem, tmp_path):
    text = DOCKERFILE.read_text()
    assert before in text
    damaged = tmp_path / "Dockerfile"
    damaged.write_text(text.replace(before, after))
    found = dockerfile_problems(damaged, ROOT)
    assert [p for p in found if problem in p], found


def test_rays_processes_have_the_settings_of_our_own_heads():
    """Without them Ray lowers its workers' priority, and full memory ends too many of them."""
    (environment,) = [
        s["value"]
        for s in DockerfileParser(str(DOCKERFILE)).structure
        if s["instruction"] == "ENV" and "RAY_AUTH_MODE" in s["value"]
    ]
    for name, value in RAY_SETTINGS.items():
        assert f"{name}={value}" in environment.split()


def test_versions_are_those_of_the_tests():
    assert CONSTRAINTS["ray"] == version("ray")
    assert {"boto3", "google-api-python-client"} <= CONSTRAINTS.keys()
    ((minor,),) = [re.findall(r"PYTHON_IMAGE=python:(3\.\d+)\.", DOCKERFILE.read_text())]
    assert minor == "3.11"  # as requires-python of pyproject.toml begins


def test_both_extras_are_those_of_the_package():
    builds = [
        s["value"] for s in DockerfileParser(str(DOCKERFILE)).structure if "EXTRA" in s["value"]
    ]
    text = "\n".join(builds)
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in ("gpu", "cpu"):
        assert re.search(rf"\b{extra}\)", text)
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE)
    assert "exit 1" in text, "another EXTRA is refused"


def run_of(text):
    """The shell command of the RUN that has the text."""
    (found,) = [
        s["value"]
        for s in DockerfileParser(str(DOCKERFILE)).structure
        if s["instruction"] == "RUN" and text in s["value"]
    ]
    return re.sub(r"^--mount=\S+\s+", "", found)


def in_shell(command, **environment):
    """What a build's shell prints where `pip` and `python` print their arguments."""
    told = 'pip() { echo "pip $*"; }; python() { echo "python $*"; }; '
    done = subprocess.run(
        ["sh", "-ec", told + command],
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


CPU = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("extra", "index", "index_used", "build"),
    [
        ("gpu", "", None, ""),
        ("gpu", "https://download.pytorch.org/whl/cu126", "whl/cu126", "+cu126"),
        ("cpu", "", "whl/cpu", "+cpu"),
    ],
)
def test_the_cuda_build_of_torch_is_an_argument(extra, index, index_used, build):
    command = run_of('"torch==')
    told = in_shell(command, EXTRA=extra, TORCH_INDEX=index, CPU_TORCH_INDEX=CPU)
    assert told.split()[-1] == f"torch=={CONSTRAINTS['torch']}{build}"
    assert ("--extra-index-url" in told) is (index_used is not None)
    assert (index_used or "pip") in told


def test_torch_and_faiss_are_used_in_one_process_in_both_orders():
    """The image's own check, as far as packages without CUDA can run it."""
    told = in_shell(run_of("IndexFlatIP"))
    assert [line.split()[-3:] for line in told.splitlines()] == [
        ["torch", "torch", "faiss"],
        ["faiss", "torch", "faiss"],
    ]
    code = told.splitlines()[0].removeprefix("python -c ").removesuffix(" torch torch faiss")
    done = subprocess.run(
        [sys.executable, "-c", code, "torch", "faiss"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == version("torch")


@pytest.mark.parametrize("name", ["platform/rayembed/errors.py", "pyproject.toml", "jobs/x.py"])
def test_what_is_copied_reaches_the_builder(name):
    assert not ignored(RULES, name)


@pytest.mark.parametrize("name", [".git/config", "outputs/runs/x", ".env", "data.jsonl", "tests/x"])
def test_nothing_else_does(name):
    assert ignored(RULES, name)
