"""What all tests share: no telemetry, no network in unit tests, one Ray with a token of its own."""

import gc
import os
import secrets
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from parts import part_of

from rayembed.pipeline.run.on_ray import RAY_SETTINGS, keep_loopback_from_proxies

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# datasets counts each load at an address of its own: without a network that waits for its name.
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tiny tensors: threads that wait for each other cost more than they do, and two test processes
# share the cores. Read when torch, BLAS and FAISS are loaded; processes of tests inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# Code that takes all cores, as a teacher does, has its threads sleep while they wait: on a busy
# machine spinning ones held up a tiny layer for a hundred times as long as it takes.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# What `auto` takes else depends on what runs beside a test, and with it the last bits of a sum.
os.environ["RAYEMBED_THREADS"] = "1"
os.environ["TESTS_SUPPORT"] = str(Path(__file__).parent / "support")

# Ray reads once, when it is first imported, whether and with which token it authenticates: all
# tests of a session share one answer, and the user's own token file is left alone.
_token_folder = tempfile.TemporaryDirectory(prefix="rayembed-tests-")
_token = Path(_token_folder.name, "auth_token")
_token.write_text(secrets.token_hex(32))
_token.chmod(0o600)
os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token)
os.environ["RAY_AUTH_MODE"] = "token"
keep_loopback_from_proxies()

# A deadline of an example measures the machine.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def seed_no_absent_gpu():
    """`torch.manual_seed` keeps a call for each GPU backend with the formatted stack, in case one
    is used later: a millisecond below pytest's frames, and mteb seeds for each of its 2,000 tasks.
    """
    import torch

    for backend in (torch.cuda, torch.mtia, torch.xpu):
        if not backend.is_available():
            backend.manual_seed_all = lambda seed: None


def pytest_configure(config):
    """Workers of pytest-xdist are forks of a process that has imported the libraries, ten to twenty
    seconds of a core for each; but not for runtimes, whose libraries share a process with no other.
    """
    workers = getattr(config.option, "tx", None) or []
    is_worker = hasattr(config, "workerinput")
    if is_worker or not workers:
        seed_no_absent_gpu()
    if is_worker or "runtimes" in str(config.args):
        return
    if workers and set(workers) == {"popen"}:
        from prepared import python_of_a_fork

        config.option.tx = [f"popen//python={python_of_a_fork()}"] * len(workers)


def pytest_collection_finish(session):
    """A session whose tests use MLflow does its migrations once."""
    gc.freeze()
    if "mlflow" in sys.modules:
        from mlflow_template import copy_new_stores

        copy_new_stores()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Garbage is looked for among what the tests of a file make, not among the millions of objects
    of libraries that files before it imported: each look took half a second at the end.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


HEAVY = ("distributed", "ray", "job", "assets")

WHOLE = {
    f"test_{name}.py"
    for name in (
        *("api", "backbone_finetune", "compression_quantised", "docs_own_loss", "job_scripts"),
        *("data_further_jobs", "data_several_jobs", "data_whole_job", "evaluation_architectures"),
        *("evaluation_model_spec", "evaluation_one_rule", "evaluation_pooled", "evaluation_starts"),
        "peers_specs",
        *(
            "estimates_gpu_benchmarks",
            "gpu_branches",
            "gpu_branches_machine",
            "gpu_gate",
            "estimates_gpu_roofline",
            "models_layers",
        ),
        *("papers_directions", "estimates_memory", "house_flats", "register_job"),
        "registry_promote",
        *("registry_requirements", "runtime_here", "training_hidden_states"),
        *("stopped_program", "training_host_waits", "wikipedia_sample_frozen"),
    )
}
"""Files of whole trainings, evaluations, jobs and scripts: more than ten CPU seconds each by
`-p cpu_seconds`, together 523 of the 1,408 that all tests without Ray took."""


def pytest_addoption(parser):
    parser.addoption("--part", help="run the tests of one part: core, house, papers or a flat")


def pytest_terminal_summary(terminalreporter):
    """A line for each part, so that a red run says where."""
    parts = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            file = report.nodeid.split("::")[0].rpartition("/")[2]
            counts = parts.setdefault(part_of(file), {})
            counts[outcome] = counts.get(outcome, 0) + 1
    for part, counts in sorted(parts.items()):
        told = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
        terminalreporter.write_line(f"part {part}: {told}")


def pytest_collection_modifyitems(config, items):
    """Keep unit and parity tests off the network, loopback excepted; skip GPU tests visibly, and
    those of minutes unless `-m slow` asks for them.
    """
    import torch

    if part := config.option.part:
        items[:] = [item for item in items if part_of(item.path.name) == part]
    for item in items:
        if not any(item.get_closest_marker(name) for name in HEAVY):
            item.add_marker(pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"]))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.path.name in WHOLE:
            item.add_marker("whole")
        slow = item.get_closest_marker("slow")
        if slow and "slow" not in config.option.markexpr:
            reason = f"run it with -m slow: {' '.join(slow.args) or 'it takes many minutes'}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def float32_where_nothing_is_asked(monkeypatch):
    """The same number type on every machine: as on a CPU that emulates bfloat16.

    Of this process; those of jobs time their CPU, so what compares vectors there names its type.
    """
    from rayembed.machine import hardware

    monkeypatch.setattr(hardware, "bfloat16_speed", lambda: 1 / 9)


@pytest.fixture(autouse=True)
def one_thread_again():
    """Tests, and the fixtures after them, have one thread, though code before asked for more."""
    _one_thread()
    yield
    _one_thread()


def _one_thread():
    import torch

    torch.set_num_threads(1)
    if faiss := sys.modules.get("faiss"):
        faiss.omp_set_num_threads(1)


@pytest.fixture(scope="session")
def cluster():
    """A Ray of four CPUs that all tests share which break none, and an object storage it knows.

    Its workers are forks of a process that has imported torch, transformers and mteb: each that
    does so anew, as those of a submitted job do, costs five to seventeen seconds of a core.
    """
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # read by Train's controller
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray
    from forked_workers import forked_workers
    from s3_server import s3_server

    import rayembed

    # Workers import the code under test, also where another checkout is installed.
    path = [os.environ["TESTS_SUPPORT"], str(Path(rayembed.__file__).parents[1])]
    with s3_server() as storage, forked_workers():
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            logging_level="ERROR",
            object_store_memory=300_000_000,
            _system_config={"health_check_period_ms": 1000},  # a lost node is known in 5 s, not 15
            runtime_env={"env_vars": {**storage, "PYTHONPATH": os.pathsep.join(path)}},
        )
        yield storage
        ray.shutdown()
