"""One local Ray cluster for all tests of this folder."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cluster():
    """A Ray of four CPUs that ends with the session."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # read by Train's controller
    import ray

    import rayembed

    # Workers import the code under test, also where another checkout is installed.
    path = [os.environ["TESTS_SUPPORT"], str(Path(rayembed.__file__).parents[1])]
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=300_000_000,
        _system_config={"health_check_period_ms": 1000},  # a lost node is known in 5 s, not 15
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}},
    )
    yield
    ray.shutdown()
