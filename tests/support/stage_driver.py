"""The driver of one stage in a process of its own, which joins a cluster and can be killed."""

import os
import sys
from pathlib import Path

import ray

from rayembed.assets.cache import cache_folder
from rayembed.assets.storage import is_remote, join
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.run import Run
from rayembed.registry.metrics_log import METRICS_FILE
from rayembed.training.job import StageJob
from rayembed.training.on_ray import train_on_ray

PASSED = ("OMP_NUM_THREADS", "PYTHONPATH", "AWS_")


def main(address: str, run_file: str, plan: str, folder: str) -> None:
    """Train the run's only stage in a folder of storage, as `pipeline.train` does."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": passed})
    local = cache_folder() / "run" if is_remote(folder) else Path(folder)
    local.mkdir(parents=True, exist_ok=True)
    files = StoredFolder(folder, local)
    files.fetch()
    place = join(folder, METRICS_FILE) if is_remote(folder) else None
    job = StageJob(Run.read(run_file), 0, plan, None, join(folder, "weights.safetensors"))
    train_on_ray(job, folder, local / METRICS_FILE, 0, metrics_place=place)
    files.keep()


if __name__ == "__main__":
    main(*sys.argv[1:])
