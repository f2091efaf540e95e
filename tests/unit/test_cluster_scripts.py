"""The scripts under cluster/: shellcheck, the token's file, what Slurm would be asked to start."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_files import CLUSTER, ROOT
from ray_options import ray_start_options

from rayembed.pipeline.run.training_job import training_job

SCRIPTS = sorted(p for p in CLUSTER.rglob("*") if p.suffix in (".sh", ".sbatch"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def shellcheck(path):
    return subprocess.run(
        [str(SHELLCHECK), "--enable=all", "--exclude=SC2250,SC2312,SC2248", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    checked = shellcheck(path)
    assert checked.returncode == 0, checked.stdout


def test_shellcheck_finds_a_fault(tmp_path):
    text = (CLUSTER / "make_token.sh").read_text()
    damaged = tmp_path / "damaged.sh"
    damaged.write_text(text.replace('mkdir -p "$folder"', "mkdir -p $folder"))
    assert damaged.read_text() != text
    checked = shellcheck(damaged)
    assert checked.returncode == 1
    assert "SC2086" in checked.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_the_first_error(path):
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


def make_token(folder):
    command = [str(CLUSTER / "make_token.sh"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, umask=0)
    return Path(done.stdout.strip())


def test_a_token_is_made_once_and_only_for_its_user(tmp_path):
    made = make_token(tmp_path / "a" / "tokens")
    token = made.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    assert made.stat().st_mode & 0o777 == 0o600
    assert made.parent.stat().st_mode & 0o777 == 0o700
    made.chmod(0o644)  # as Ray itself writes it
    assert make_token(made.parent) == made
    assert made.read_text() == token
    assert made.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in made.parent.iterdir()] == ["auth_token"]
    assert make_token(tmp_path / "other").read_text() != token


def test_an_empty_token_is_made_anew(tmp_path):
    (tmp_path / "auth_token").touch()
    assert len(make_token(tmp_path).read_text()) == 64


STAND_IN = """#!/usr/bin/env bash
# Writes down how it was called, and with which of the variables that matter.
case "$(basename "$0")" in
    scontrol) if [ "$1" = requeue ]; then echo "$@" > "$CALLS.requeued"; exit; fi
          printf 'node1\\nnode2\\n'; exit ;;
    srun) for word in "$@"; do if [ "$word" = hostname ]; then echo '10.0.0.7 172.17.0.1'; exit; fi
          done
          {
              printf '%s\\n' "$@"
              echo "== $RAY_AUTH_MODE $(stat -c %a "$RAY_AUTH_TOKEN_PATH") $RAY_AUTH_TOKEN_PATH"
          } > "$CALLS"
          while [ "$1" != bash ]; do shift; done
          code=0
          SLURM_PROCID=0 "$@" || code=$?
          # The other task's, which it has ended after a bad one.
          if [ $code != 0 ]; then exit "${OF_SRUN:-$code}"; fi
          exit ;;
    ray)  # symmetric-run: the job where Ray has started, and well ended where it has not
          [ -n "${NO_RAY:-}" ] && exit 0
          while [ "$1" != -- ]; do shift; done
          shift
          "$@"
          exit "${STATUS:-0}" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    """Runs the batch script with stand-ins for Slurm's commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("srun", "scontrol", "ray"):
        (commands / name).write_text(STAND_IN)
        (commands / name).chmod(0o755)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("")
    (commands / "python").write_text("#!/usr/bin/env bash\nexit 0\n")
    (commands / "python").chmod(0o755)
    calls = tmp_path / "calls"

    def run(*arguments, nodes=2, gpus=8, **variables):
        environment = {
            "PATH": f"{commands}:/usr/bin:/bin",
            "HOME": str(tmp_path / "home"),
            "CALLS": str(calls),
            "RAYEMBED_HOME": str(ROOT),
            "RAYEMBED_VENV": str(tmp_path / "venv"),
            "RAYEMBED_STORAGE": "s3://bucket/runs",
            "RAYEMBED_TRACKING_URI": "http://mlflow:5000",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_GPUS_ON_NODE": str(gpus),
            "SLURM_CPUS_PER_TASK": "96",
            **variables,
        }
        kept = {name: value for name, value in environment.items() if value}
        command = ["bash", str(CLUSTER / "slurm" / "train.sbatch"), *arguments]
        done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def job_of(words):
    """The arguments of the training job in a command, after `python -u jobs/….py`."""
    return words[words.index("-u") + 2 :]


def test_slurm_starts_ray_on_all_nodes_and_the_job_on_the_first(slurm, tmp_path):
    stages = [("--set", f"stages.{one}.batch.global_pairs=32") for one in ("retrieval", "blend")]
    done, told = slurm("--recipe", "nvembed-quickstart", "--name", "of-slurm", *sum(stages, ()))
    assert done.returncode == 0, done.stderr
    *words, marker = told
    assert words[:3] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    start = words.index("ray")
    assert words[start : start + 6] == [
        *("ray", "symmetric-run", "--address", "10.0.0.7:6379", "--min-nodes", "2"),
    ]
    separator = words.index("--")
    options = [word.partition("=")[0] for word in words[start + 6 : separator]]
    assert "--dashboard-host=127.0.0.1" in words
    assert set(options) <= ray_start_options()
    assert words[separator + 1 : separator + 3] == ["env", "RAY_ADDRESS=10.0.0.7:6379"]
    run, _ = training_job("nvembed-quickstart").resolve(job_of(words))
    assert (run.placement.workers, run.placement.use_gpu) == (16, True)
    assert (run.name, run.placement.storage_path) == ("of-slurm", "s3://bucket/runs")
    mode, rights, token = marker.removeprefix("== ").split()
    assert (mode, rights) == ("token", "600")
    assert not Path(token).exists(), "the token outlives its job"
    assert token.startswith(str(tmp_path / "home"))


def test_ray_takes_the_options_that_slurm_gives_it(slurm):
    from ray.scripts.symmetric_run import curate_and_validate_ray_start_args

    _, told = slurm()
    given = told[told.index("symmetric-run") + 1 : told.index("--")]
    passed = curate_and_validate_ray_start_args(given)
    assert "--dashboard-host=127.0.0.1" in passed
    assert "--address" not in passed
    with pytest.raises(Exception, match="Cannot use --head"):
        curate_and_validate_ray_start_args([*given, "--head"])


@pytest.mark.parametrize(("cpus", "of_worker"), [(96, 95), (3, 2), (2, 1.5), (1, 0.75)])
def test_nodes_without_gpus_and_a_known_head(slurm, cpus, of_worker):
    """A worker takes more than half of a node, so that each has one."""
    known = {"RAY_HEAD_IP": "192.168.1.5", "RAY_HEAD_PORT": "7000"}
    done, told = slurm(nodes=1, gpus=0, SLURM_CPUS_PER_TASK=str(cpus), **known)
    assert done.returncode == 0, done.stderr
    assert "192.168.1.5:7000" in told
    run, _ = training_job("nvembed-quickstart").resolve(job_of(told[:-1]))
    assert (run.placement.workers, run.placement.use_gpu) == (1, False)
    assert run.placement.cpus_per_worker == of_worker > cpus / 2


def test_a_failed_job_is_a_failed_script_and_leaves_no_token(slurm, tmp_path):
    done, told = slurm(STATUS="3")
    assert done.returncode == 3
    assert not Path(told[-1].split()[-1]).exists()
    assert not list((tmp_path / "home" / ".rayembed").iterdir())


@pytest.mark.parametrize(
    ("status", "restarts", "again"),
    [
        (137, 0, True),
        (139, 2, True),
        (137, 3, False),
        (1, 0, False),
        (130, 0, False),
        (143, 0, False),
        (247, 0, True),
        (245, 2, True),
        (247, 3, False),
        (254, 0, False),
        (241, 0, False),
    ],
)
@pytest.mark.parametrize("of_srun", ["", "143"])
def test_a_job_that_was_killed_is_put_back_into_the_queue(
    slurm, tmp_path, status, restarts, again, of_srun
):
    """As shells tell a signal (128 + 9) and as symmetric-run does (-9), whatever srun tells."""
    done, _ = slurm(STATUS=str(status), SLURM_RESTART_COUNT=str(restarts), OF_SRUN=of_srun)
    assert done.returncode == status
    requeued = tmp_path / "calls.requeued"
    assert requeued.exists() is again
    if again:
        assert requeued.read_text().split() == ["requeue", "77"]
        signal = 256 - status if status > 192 else status - 128
        assert f"killed by signal {signal};" in done.stderr


def test_objects_are_spilled_where_the_user_says(slurm):
    assert not [word for word in slurm()[1] if "spilling" in word]
    _, told = slurm(RAYEMBED_SPILL="/local/a b")
    assert "--object-spilling-directory=/local/a b" in told
    assert "--object-spilling-directory" in ray_start_options()


def test_a_ray_that_did_not_start_is_a_failed_script(slurm):
    done, _ = slurm(NO_RAY="1")
    assert done.returncode == 1
    assert "Ray did not start" in done.stderr


@pytest.mark.parametrize("name", ["RAYEMBED_HOME", "RAYEMBED_STORAGE", "RAYEMBED_TRACKING_URI"])
def test_what_must_be_set_is_named(slurm, name):
    done, told = slurm(**{name: ""})
    assert done.returncode != 0
    assert f"{name}: set it to" in done.stderr
    assert told == []
