"""The data job of `every_step.py` on the cluster at `RAY_ADDRESS`, as the driver of a job runs it.

    python every_step_on_ray.py INPUTS STORAGE MODEL RESULT

The language model is at the address MODEL; what training would read goes to the file RESULT, as
text.
"""

import os
import sys
from pathlib import Path

import ray
from every_step import everything

from rayembed.data.engine.on_ray import execute_with_ray_data

if __name__ == "__main__":
    inputs, storage, model, result = sys.argv[1:]
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    found = everything(Path(inputs), storage, model, execute_with_ray_data)
    Path(result).write_text(repr(found))
