"""The data job of `data_job.py` on the cluster at `RAY_ADDRESS`, as the driver of a job runs it.

    python data_job_on_ray.py INPUTS STORAGE RECORDS

The records of its batches go to the file RECORDS, as text.
"""

import os
import sys
from pathlib import Path

import ray
from data_job import prepared

from rayembed.data.on_ray import execute_with_ray_data

if __name__ == "__main__":
    inputs, storage, records = sys.argv[1:]
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    found = prepared(Path(inputs), storage, execute_with_ray_data)
    Path(records).write_text(repr(found))
