"""CPU seconds of a verification beside loading, and of writing the proof: all-MiniLM-L6-v2.

python benchmarks/verification.py [--threads 1] [--repeat 2]
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

from rayembed.assets.resolver import resolve_model
from rayembed.config.types import expanded_name
from rayembed.proof.proof import PROOF_FOLDER, read_proof
from rayembed.proof.write import write_proof
from rayembed_extras.verification.diagnose import diagnose
from rayembed_extras.verification.loaded import open_folder
from rayembed_extras.verification.measure import measure


def timed(what, act):
    cpu, wall = time.process_time(), time.perf_counter()
    made = act()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{what:36} {cpu:6.2f} CPU seconds {wall:6.2f} seconds", flush=True)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        shutil.copytree(resolve_model(expanded_name(asked.model)), folder)
        proof = timed("write the proof, loading included", lambda: write_proof(folder))
        print(f"{len(proof.texts)} texts, {len(proof.mistakes)} mistakes")
        for file in sorted((folder / PROOF_FOLDER).iterdir()):
            print(f"{file.name:36} {file.stat().st_size:,} bytes")
        target = timed("load by sentence-transformers", lambda: open_folder(folder, device="cpu"))
        target.embed(proof.texts[:2])  # the first pass sets up threads and kernels

        def verify():
            read = read_proof(folder)
            return diagnose(read, target, measure(target, read.texts, asked.repeat))

        print(timed(f"verify, {asked.repeat} times", verify).line)


if __name__ == "__main__":
    main()
