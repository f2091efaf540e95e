"""A real MLflow server on loopback, which can be killed and started again."""

import os
import signal
import sys
import time
from pathlib import Path

import requests
from mlflow_template import new_store
from prepared import Forked

from rayembed.pipeline.run.on_ray import free_port

START_SECONDS = 180


class MlflowServer:
    """It keeps its port and its store, in a new folder, when it is started again."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        new_store(folder / "server.db")
        self.folder, self.host = folder, host
        self.port = free_port()
        self.uri = f"http://{host}:{self.port}"
        self.process: Forked | None = None

    def start(self) -> None:
        """Return when it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", self.host]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        settings = {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        with (self.folder / "server.log").open("ab") as log:
            # In a group of its own, so that the workers it starts go with it.
            environment = {**os.environ, **settings}
            self.process = Forked(command, stdout=log, stderr=log, cwd=self.folder, env=environment)
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                if requests.get(f"{self.uri}/health", timeout=2).ok:
                    return
            except requests.RequestException:
                pass
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < end, (self.folder / "server.log").read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
