"""Nothing that makes or runs a graph opens a socket."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def told_and_refused(event, _):
    if event in ("socket.__new__", "socket.connect", "socket.getaddrinfo"):
        os.write(log, f"{event}\\n".encode())
        raise OSError("no network")
sys.addaudithook(told_and_refused)
from rayembed_extras.compression import graphs
if sys.argv[2] == "loud":
    graphs.without_telemetry = lambda: None
openvino = graphs.import_openvino()
import nncf
import numpy as np
import openvino.opset13 as ops
given = ops.parameter([-1, 8], np.float32)
made = ops.matmul(given, ops.constant(np.eye(8, dtype=np.float32)), False, False)
model = openvino.Model([ops.result(made)], [given])
nncf.quantize(model, nncf.Dataset([np.ones((1, 8), np.float32)]), subset_size=1)
graphs.import_onnxruntime()
from openvino.tools import ovc
os.write(log, f"taken {type(ovc.telemetry).__module__}\\n".encode())
"""


def seen(folder, how):
    log = folder / how
    # Without pytest's own mark, at which NNCF keeps silent, and without CI's.
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "TF_BUILD", "JENKINS_URL")}
    platform = Path(__file__).parents[2] / "platform"
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(log), how],
        env=kept | {"HOME": str(folder), "PYTHONPATH": str(platform)},
        check=True,
        capture_output=True,
        timeout=300,
    )
    return log.read_text().splitlines()


@pytest.mark.parametrize(("how", "sends"), [("silent", False), ("loud", True)])
def test_no_socket_is_opened_unless_the_switch_is_off(tmp_path, how, sends):
    found = seen(tmp_path, how)
    # Others come from threads, at any time.
    (taken,) = (line.partition(" ")[2] for line in found if line.startswith("taken "))
    assert taken.startswith("openvino_telemetry" if sends else "openvino.tools.ovc")
    assert any(line.startswith("socket.") for line in found) == sends
