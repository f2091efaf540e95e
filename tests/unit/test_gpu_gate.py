"""Statements that branch by a device, and calls of `torch.cuda`, are reached without a GPU."""

import os
import subprocess
import sys

from gpu_branches import FILE, PLATFORM, Branch, branches, needed, written

TESTS = ("tests/unit/test_gpu_branches.py", "tests/unit/test_gpu_branches_machine.py")
"""Files that reach them, in seconds: a branch of yours needs a test in one of these."""

ELSEWHERE = {
    "rayembed/data/engine/on_ray.py execute_with_ray_data: "
    "needs == 'cpu' or not placement.use_gpu": (
        "Ray places the task: tests/ray/test_data_on_ray.py, with CPUs and made-up GPUs of a node"
    ),
    "rayembed_extras/estimates/model_sizes.py kept_bytes.pack: tensor.device.type == 'meta'": (
        "tests/unit/test_estimates_memory.py counts tensors of both"
    ),
    "rayembed_extras/serving/service.py EmbeddingService._check_proof: "
    "self._model.device.type == 'cpu'": (
        "a GPU checks the long texts, too: tests/unit/test_serving_proof.py, on a CPU"
    ),
}
"""What is reached by other tests, or by a GPU alone, and why."""


def unreached(seen):
    """A line for each branch that lacks an outcome, by the outcomes that tests saw."""
    return [
        f"{branch} never {' or '.join(sorted(missing))}"
        for branch in branches()
        if str(branch) not in ELSEWHERE and (missing := needed(branch) - seen.get(branch, set()))
    ]


def test_every_branch_on_a_device_is_reached(tmp_path):
    root = PLATFORM.parent
    path = os.pathsep.join(map(str, (PLATFORM, root / "tests/support")))
    env = os.environ | {"PYTHONPATH": path, FILE: str(tmp_path / "outcomes.json")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "gpu_branches", "-p", "no:xdist", *TESTS],
        cwd=root,
        env={name: value for name, value in env.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    missed = unreached(written(tmp_path / "outcomes.json"))
    assert not missed, (
        f"add a test to {', '.join(TESTS)}, or a reason to ELSEWHERE, for\n" + "\n".join(missed)
    )


def test_the_control_what_no_test_reached_is_told():
    known = {str(branch) for branch in branches()}
    assert ELSEWHERE.keys() <= known, "of code that is gone"
    told = unreached({})
    assert len(told) == len(known) - len(ELSEWHERE) > 50
    assert (
        "rayembed/machine/hardware.py default_device: "
        "torch.cuda.is_available() never False or True" in told
    )
    half = {branch: needed(branch) - {"False"} for branch in branches()}
    assert all(line.endswith(" never False") for line in unreached(half))


def test_branches_are_found_in_each_form(tmp_path, monkeypatch):
    source = """
def f(x, device, state):
    if x.is_cuda and x.ndim: return 1
    a = 1 if x.device.type == "cpu" else 2
    while device.startswith("cuda"): pass
    if torch.cuda.get_device_capability()[0] > 8: b = torch.cuda.mem_get_info()[0]
    if x.kind.type == 3 or x.ndim: pass
    return "cuda" in state
    pinned = device == "cuda"  # no branch here
class C:
    def g(self):
        return self.device == "cpu" or 3
"""
    (tmp_path / "m.py").write_text(source)
    monkeypatch.setattr("gpu_branches.PLATFORM", tmp_path)
    found = {branch: needed(branch) for branch in branches()}
    both, called = {"True", "False"}, {"called"}
    assert found == {
        Branch("m.py", "f", "x.is_cuda and x.ndim"): both,
        Branch("m.py", "f", "x.device.type == 'cpu'"): both,
        Branch("m.py", "f", "device.startswith('cuda')"): both,
        Branch("m.py", "f", "torch.cuda.get_device_capability()[0] > 8"): both,
        Branch("m.py", "f", "torch.cuda.get_device_capability"): called,
        Branch("m.py", "f", "torch.cuda.mem_get_info"): called,
        Branch("m.py", "f", "'cuda' in state"): both,
        Branch("m.py", "C.g", "self.device == 'cpu' or 3"): both,
    }
