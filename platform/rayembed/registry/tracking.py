"""Track a run in MLflow: one process sends local data whenever MLflow is reachable.

Metrics stand in the metrics log; scores, files, tags and the final status in an outbox. Both are
kept in the run's folder, so that a server that dies midway costs nothing: training goes on, and
everything is sent when it is back, or later by the same job with `--send-metrics`.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rayembed.assets.storage import write_atomic
from rayembed.config.document import NamedRun, published_values, without_places
from rayembed.errors import ArtifactError, TrackingError
from rayembed.registry.metrics_log import (
    KEYS,
    METRICS_FILE,
    LogReader,
    MetricsLog,
    Record,
    record_of,
)
from rayembed.registry.mlflow_run import (
    FINGERPRINT_TAG,
    NOTE_OF_TRAINING,
    NOTE_TAG,
    TAG_CHARACTERS,
    Entry,
    Outbox,
    allowed_key,
    as_tracking_error,
    batches,
    find_experiment,
    find_run,
    log_params,
    open_client,
    send_entry,
)
from rayembed.registry.run_folder import flatten
from rayembed.registry.tracking_uri import check_reachable

Status = Literal["FINISHED", "FAILED", "KILLED"]

TRACKING_FILE = "mlflow.json"
"""File in a run's folder that names its MLflow run."""

MAX_POINTS = 10_000
"""Maximum points of one metric in MLflow; longer runs send every n-th step. MLflow's pages and
metric queries get slow beyond that; the metrics log has every step."""

SENT_TAG = "rayembed.sent_global_step"
"""Tag updated with each batch of metrics; the progress in MLflow is read only from it."""

BUSY_SECONDS = 30
"""Maximum seconds that training waits for a request of the forwarding thread."""

_logger = logging.getLogger(__name__)


class Tracker:
    """MLflow client that is the only writer of one run. Made by `open`, `open_for_run` or `reopen`.

    As a context manager it closes the run at the end of the block: as `status` says, or as failed
    or killed where an error or an interrupt ends the block. Raises as `close`.
    """

    status: Status = "FINISHED"
    """How the run ends if no error ends the block."""
    complete = False
    """Whether MLflow has all data of a closed run."""

    def __init__(self, folder: Path, state: Mapping[str, Any]) -> None:
        self.folder = folder
        self._storage = ""
        self.tracking_uri: str = state["tracking_uri"]
        self.run_id: str = state["run_id"]
        self.experiment_id: str = state["experiment_id"]
        self._every_steps: int = state["every_steps"]
        self._client = open_client(self.tracking_uri)
        self._outbox = Outbox(folder / "mlflow_outbox.jsonl")
        self._lock = threading.RLock()
        self._away = False
        self._away_lock = threading.Lock()
        self._log: MetricsLog | None = None
        self._reader: LogReader | None = None
        self._pending: dict[int, Record] = {}
        self._sent: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        status = self.status
        if kind is not None:
            stopped = issubclass(kind, KeyboardInterrupt | SystemExit)
            status = "KILLED" if stopped else "FAILED"
        self.complete = self.close(status)

    @classmethod
    def open(
        cls,
        tracking_uri: str,
        experiment: str,
        run_name: str,
        fingerprint: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        folder: str | Path,
        total_steps: int,
        note: str = "",
        storage: str = "",
    ) -> "Tracker":
        """Open the MLflow run with this name and fingerprint, or create it.

        Args:
            tracking_uri: as `resolve_tracking_uri` gives it.
            params: identity of the run, as `published_values` gives it; MLflow keeps the values of
                the first time.
            tags: may change from one time to the next.
            folder: the run's folder on local disk, for what could not be sent yet.
            total_steps: steps of the run, of which at most `MAX_POINTS` are sent.
            note: description that a new run gets.
            storage: folder of all results. Local paths among tags and provenance are sent
                relative to it, others by their last part.

        Raises:
            TrackingError: MLflow is away (known within seconds) or refuses.
            ArtifactError: MLflow has a run of that name with another fingerprint.
        """
        client = open_client(tracking_uri)
        with as_tracking_error(tracking_uri):
            experiment_id = find_experiment(client, experiment, tracking_uri)
            run_id = find_run(client, experiment, experiment_id, run_name, fingerprint)
            if run_id is None:
                first = {FINGERPRINT_TAG: fingerprint} | ({NOTE_TAG: note} if note else {})
                made = client.create_run(experiment_id, run_name=run_name, tags=first)
                run_id = made.info.run_id
            state = {
                "tracking_uri": tracking_uri,
                "experiment": experiment,
                "experiment_id": experiment_id,
                "run_name": run_name,
                "run_id": run_id,
                "fingerprint": fingerprint,
                "every_steps": max(1, math.ceil(total_steps / MAX_POINTS)),
            }
            tracker = cls(Path(folder), state)
            tracker._storage = storage
            tracker._take_over(state)
            log_params(client, run_id, params)
            for key, value in without_places(tags, storage).items():
                client.set_tag(run_id, allowed_key(key), str(value)[:TAG_CHARACTERS])
        return tracker

    @classmethod
    def open_for_run(
        cls, run: NamedRun, tracking_uri: str, folder: str | Path, tags: Mapping[str, str]
    ) -> "Tracker":
        """Open a run's MLflow run: its identity becomes params, its placement tags. Raises as
        `open`.
        """
        storage = run.placement.storage_path
        placement = published_values(run.placement, storage)
        return cls.open(
            tracking_uri,
            run.placement.experiment,
            run.name,
            run.fingerprint,
            flatten(run.published_identity),
            {**{f"placement.{name}": str(value) for name, value in placement.items()}, **tags},
            folder=folder,
            total_steps=run.total_steps,
            note=NOTE_OF_TRAINING,
            storage=storage,
        )

    @classmethod
    def reopen(cls, folder: str | Path, *, tracking_uri: str | None = None) -> "Tracker":
        """Open the MLflow run of an existing run's folder, to send pending data.

        Args:
            tracking_uri: where the same MLflow is now; None: where it was.

        Raises:
            ArtifactError: the folder is not that of a tracked run.
            TrackingError: MLflow is away.
        """
        path = Path(folder) / TRACKING_FILE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{str(folder)!r} is not the folder of a tracked run: {error}; expected the folder "
                f"that holds {METRICS_FILE} and {TRACKING_FILE}"
            ) from None
        if tracking_uri is not None:
            state["tracking_uri"] = tracking_uri
        return cls(Path(folder), state)

    def start_forwarding(self, log: MetricsLog, every_seconds: float = 15.0) -> None:
        """Send data from a background thread until `close`; warn once if MLflow is unreachable."""
        assert self._thread is None, "forwarding was started before"
        self._log = log
        self._thread = threading.Thread(
            target=self._forward_regularly, args=(every_seconds,), name="mlflow", daemon=True
        )
        self._thread.start()

    def log_resolved_run(self, text: str) -> None:
        """Log the run's settings as the artifact `run.yaml`."""
        self._tell({"kind": "text", "text": text, "name": "run.yaml"})

    def log_scores(self, name: str, scores: Mapping[str, float], global_step: int) -> None:
        """Log scores as metrics `<name>/<task>` at the step.

        One name for one curve: `eval` for the model in training, at 0 before training and at the
        step after each stage; the name of a baseline for a baseline. A score that is told again,
        by a run that was submitted again, makes no second point, whatever is told beside it.
        """
        known: dict[str, float] = {}
        for entry in self._outbox.entries():
            if entry["kind"] == "scores" and entry["step"] == global_step:
                known |= entry["values"]
        values = {f"{name}/{task}": float(score) for task, score in scores.items()}
        new = {key: value for key, value in values.items() if known.get(key) != value}
        if new:
            told = {"kind": "scores", "values": new, "step": global_step}
            self._tell({**told, "time": time.time()})

    def log_artifact(self, path: str | Path, artifact_folder: str = "") -> None:
        """Log a file or folder as artifact; it must stay on disk until sent.

        Raises:
            ArtifactError: there is no such file.
        """
        if not Path(path).exists():
            raise ArtifactError(f"the file {str(path)!r}, to be logged to MLflow, does not exist")
        place, home = Path(path).absolute(), self.folder.absolute()
        if place.is_relative_to(home):
            # The run's folder lies elsewhere on another machine that goes on with the run.
            place = place.relative_to(home)
        self._tell({"kind": "file", "path": str(place), "folder": artifact_folder})

    def log_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Log the result of `collect_provenance` as `provenance.json`, and the commit as tags."""
        told = without_places(provenance, self._storage)
        text = json.dumps(told, indent=2, ensure_ascii=False)
        self._tell({"kind": "text", "text": text, "name": "provenance.json"})
        code = provenance.get("code") or {}
        tags = {"rayembed.version": str(code.get("version", ""))}
        if code.get("commit"):
            tags["mlflow.source.git.commit"] = str(code["commit"])
            tags["rayembed.uncommitted_changes"] = str(code.get("uncommitted_changes"))
        self.set_tags(tags)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._tell({"kind": "tags", "tags": without_places(tags, self._storage)})

    def close(self, status: Status) -> bool:
        """End the run; return whether MLflow has all data, and warn how to send the rest if
        not.

        Raises:
            ArtifactError: the run's files cannot be written or read. Of a failed run this is only
                warned of: what made it fail stays the error that is told.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=BUSY_SECONDS)
        try:
            self._outbox.put({"kind": "status", "status": status, "time": time.time()})
            self.send_all(self._log)
        except ArtifactError as error:
            if status == "FINISHED":
                raise
            _logger.warning("%s", error)
            return False
        except TrackingError as error:
            _logger.warning(
                "MLflow lacks data of this run: %s\nNothing is lost. The metrics are in %s. When "
                "the server is back, the same command with --send-metrics sends them.",
                error,
                self.folder / METRICS_FILE,
            )
            return False
        return True

    def send_all(self, log: MetricsLog | None, *, to_the_end: bool = True) -> int:
        """Send all pending data to MLflow, including the last step's; return the number of steps
        sent.

        Steps already in MLflow are skipped.

        Args:
            to_the_end: whether a last step is sent that is none of every n-th.

        Raises:
            TrackingError: MLflow is away; what was not sent will be by a later call.
        """
        with self._turn(), as_tracking_error(self.tracking_uri):
            sent = 0 if log is None else self._send_metrics(log, to_the_end=to_the_end)
            self._send_outbox()
        self._note_back()
        return sent

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Record the MLflow run in the folder, send an earlier process's data, set RUNNING."""
        path = self.folder / TRACKING_FILE
        if path.exists():
            former = json.loads(path.read_text(encoding="utf-8"))
            if former.get("run_id") != self.run_id:
                self._outbox.restart()
        write_atomic(path, json.dumps(state, indent=2, ensure_ascii=False).encode())
        # Before RUNNING: an earlier process's status may be among what waits.
        self._send_outbox()
        self._client.update_run(self.run_id, status="RUNNING")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one request at a time through; first check that the server answers, so that no
        retries are spent on a dead one.
        """
        if not self._lock.acquire(timeout=BUSY_SECONDS):
            raise TrackingError(f"a request to {self.tracking_uri} has hung for {BUSY_SECONDS} s")
        try:
            check_reachable(self.tracking_uri)
            yield
        finally:
            self._lock.release()

    def _forward_regularly(self, every_seconds: float) -> None:
        while not self._stop.wait(every_seconds):
            try:
                self.send_all(self._log, to_the_end=False)
            except (TrackingError, ArtifactError) as error:
                self._warn_away(error)

    def _tell(self, entry: Entry) -> None:
        self._outbox.put(entry)
        try:
            self.send_all(None)
        except TrackingError as error:
            self._warn_away(error)

    def _warn_away(self, error: Exception) -> None:
        if not self._set_away(True):
            _logger.warning(
                "%s\nTraining goes on. Metrics are kept in %s and sent when MLflow is back.",
                error,
                self.folder / METRICS_FILE,
            )

    def _note_back(self) -> None:
        if self._set_away(False):
            _logger.info("MLflow at %s is reachable again and has all data", self.tracking_uri)

    def _set_away(self, away: bool) -> bool:
        """Record whether the server is away; return the former state."""
        with self._away_lock:
            before, self._away = self._away, away
        return before

    def _send_metrics(self, log: MetricsLog, *, to_the_end: bool) -> int:
        from mlflow.entities import Metric, RunTag

        if self._reader is None or log.path != self._reader.path:
            self._reader = LogReader(log.path, record_of)
        if self._sent is None:
            tags = self._client.get_run(self.run_id).data.tags
            self._sent = int(tags.get(SENT_TAG, 0))
        # By step: a log that was cut at a resume is read again from its start.
        self._pending.update({record["global_step"]: record for record in self._reader.read()})
        new = [self._pending[step] for step in sorted(self._pending) if step > self._sent]
        chosen = [record for record in new if record["global_step"] % self._every_steps == 0]
        if to_the_end and new and new[-1] not in chosen:
            chosen.append(new[-1])
        for batch in batches(chosen):
            metrics = [
                Metric(allowed_key(f"train/{name}"), value, int(record["time"] * 1000), step)
                for record in batch
                for step in [record["global_step"]]
                for name, value in record.items()
                # Charts have no place for what is not finite; train/dropped_steps tells of it.
                if name not in KEYS and math.isfinite(value)
            ]
            last = batch[-1]["global_step"]
            # MLflow writes the tag after the metrics. Killed in between, the same points are sent
            # again, and a point that is equal in step, time and value is stored once.
            self._client.log_batch(self.run_id, metrics, tags=[RunTag(SENT_TAG, str(last))])
            self._sent = last
        self._pending = {
            step: record for step, record in self._pending.items() if step > self._sent
        }
        return len(chosen)

    def _send_outbox(self) -> None:
        for entry in self._outbox.waiting():
            send_entry(self._client, self.run_id, entry, self.folder)
            self._outbox.taken()


def send_metrics(folder: str | Path, *, tracking_uri: str | None = None) -> int:
    """Send all pending data of a run's folder to MLflow; return the number of steps sent.

    Raises:
        ArtifactError: the folder is not that of a tracked run.
        TrackingError: MLflow is away.
    """
    tracker = Tracker.reopen(folder, tracking_uri=tracking_uri)
    return tracker.send_all(MetricsLog(Path(folder) / METRICS_FILE))
