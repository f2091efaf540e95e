"""A cluster that a script starts for itself, seen from a process that imports Ray first there."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ray

SCRIPT = """
import json, os
from rayembed.pipeline.on_ray import connect
connect()
import ray

@ray.remote(num_cpus=0)
class Sees:
    def all(self):
        from ray.util.state import get_actor
        state = get_actor(ray.get_runtime_context().get_actor_id())
        return [os.nice(0), os.environ["RAY_API_SERVER_ADDRESS"], state and state.state]

dashboard = ray._private.worker.global_worker.node.webui_url
print("SEEN", json.dumps([*ray.get(Sees.remote().all.remote()), f"http://{dashboard}"]))
"""


def test_its_processes_ask_its_own_dashboard_and_have_its_priority(tmp_path):
    """Train takes its controller for dead when it asks another cluster of the machine.

    Its token is one that only its user can read, made before Ray makes another.
    """
    leave = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    unset = {name: value for name, value in os.environ.items() if name not in leave}
    unset["HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        env=unset,
        timeout=120,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, done.stderr[-3000:]
    niceness, asked, state, dashboard = json.loads(lines[0].removeprefix("SEEN "))
    assert niceness == os.nice(0)
    assert asked == dashboard
    assert state == "ALIVE"
    token = tmp_path / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
