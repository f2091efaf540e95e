"""A process that imports Ray first where it connects: its own cluster, and signals that it gets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray

pytestmark = pytest.mark.ray

SCRIPT = """
import json, os, signal
from rayembed.pipeline.run.on_ray import connect
connect()
import psutil, ray

@ray.remote(num_cpus=0)
class Sees:
    def all(self):
        from ray.util.state import get_actor
        state = get_actor(ray.get_runtime_context().get_actor_id())
        return [os.nice(0), os.environ["RAY_API_SERVER_ADDRESS"], state and state.state]

def blocks_hangups(pid):
    words = open(f"/proc/{pid}/status").read().split()
    return bool(int(words[words.index("SigBlk:") + 1], 16) & 1 << signal.SIGHUP - 1)

dashboard = ray._private.worker.global_worker.node.webui_url
seen = [*ray.get(Sees.remote().all.remote()), f"http://{dashboard}"]
below = [p.pid for p in psutil.Process().children() if os.getpgid(p.pid) == os.getpgid(0)]
hangs_up = sum(not blocks_hangups(pid) for pid in below), blocks_hangups(os.getpid())
print("SEEN", json.dumps([*seen, len(below), hangs_up]))
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
    seen = json.loads(lines[0].removeprefix("SEEN "))
    niceness, asked, state, dashboard, processes, hangs_up = seen
    assert processes > 1  # of Ray, in the group that a closed terminal's shell sends SIGHUP to
    assert hangs_up == [0, False]
    assert niceness == os.nice(0)
    assert asked == dashboard
    assert state == "ALIVE"
    token = tmp_path / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64


WAITS = """
import sys
from rayembed.pipeline.job import exit_code
from rayembed.pipeline.run.on_ray import connect

def work():
    connect()
    import ray, time
    print("waits", flush=True)
    ray.get(ray.remote(num_cpus=0)(lambda: time.sleep(100)).remote())

sys.exit(exit_code(work, stopped="stopped; go on so"))
"""


def test_a_job_that_waits_for_ray_hears_both_signals_at_once(cluster):
    """Ray's own handlers, which `ray.init` and its workers set, would end it otherwise: one with
    addresses of C++ functions and without a word of ours.
    """
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    jobs = {
        number: subprocess.Popen(
            [sys.executable, "-c", WAITS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for number, job in jobs.items():
            assert job.stdout.readline() == "waits\n"
            time.sleep(0.5)  # it is in ray.get
            told = []
            reader = threading.Thread(
                target=lambda lines, told: told.extend((time.monotonic(), s) for s in lines),
                args=(job.stderr, told),
            )
            reader.start()
            sent = time.monotonic()
            job.send_signal(number)
            assert job.wait(60) == 128 + number
            reader.join(10)
            text = "".join(line for _, line in told)
            at = [at for at, line in told if line.startswith(f"{number.name}: the job is stopped")]
            assert at, text
            assert at[0] - sent < 2  # 0.2 s; Ray itself looks for signals once a second
            # Where a busy machine ends it late, Ray's own log says that a task was lost: one line.
            ours = [line for line in text.splitlines() if not line.startswith("[20")]
            assert ours[-1] == "stopped; go on so", text
            assert "PC: @" not in text
            assert "Traceback" not in text
    finally:
        for job in jobs.values():
            job.kill()
            job.communicate()
