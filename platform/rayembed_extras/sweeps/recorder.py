"""Record a running sweep: turn Ray Tune's trial events into stored records. Independent of Ray."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayembed_extras.sweeps.trial_store import Report, TrialRecord, TrialStore, best

logger = logging.getLogger(__name__)


class TrialRecorder:
    """Writes trial events to the trial store.

    Args:
        past: records of earlier submissions.
    """

    def __init__(self, trial_store: TrialStore, past: Mapping[str, TrialRecord]) -> None:
        self._trial_store = trial_store
        self.records = dict(past)
        self._recorded: set[str] = set()
        self._ended: set[str] = set()

    @property
    def num_ended(self) -> int:
        """Number of trials that have ended in this submission, for any reason."""
        return len(self._ended)

    def record_start(self, given: TrialRecord) -> None:
        """Record the start of a trial, so that it is known even if it yields no score.

        Args:
            given: a record of what it was given.
        """
        if given.key not in self.records:
            self._put(given)

    def record(self, trial_id: str, given: TrialRecord, result: Mapping[str, Any]) -> None:
        """Record a trial's event: a score, or its end.

        Args:
            trial_id: Ray Tune's.
            given: a record of what it was given.
            result: the values of an event.
        """
        self._recorded.add(trial_id)
        if result["kind"] != "score":
            self._ended.add(trial_id)
        if result["kind"] == "known":
            logger.info(
                "%s  ended in an earlier submission with a score of %.4f",
                given.key,
                result["score"],
            )
            return
        report = Report(result["global_step"], result["score"], result["scores"], time.time())
        record = self.records.get(given.key, given)
        match result["kind"]:
            case "score":
                record = record.reported(report)
            case "final":
                evaluation = dict(result["evaluation"])
                record = replace(
                    record, state="finished", final=report, evaluation=evaluation, problem=""
                )
            case "problem":
                record = replace(record, state="failed", problem=result["problem"])
        self._put(record)
        if record.state == "failed":
            logger.warning("%s  failed: %s", record.key, record.problem)
        else:
            self._log_report(record, report)

    def record_end(self, trial_id: str, key: str) -> None:
        """Record the end of a trial; if it has not finished, the scheduler stopped it."""
        if trial_id not in self._recorded or trial_id in self._ended:
            return
        self._ended.add(trial_id)
        if self.records[key].state == "begun":
            self._put(replace(self.records[key], state="stopped"))
            logger.info("%s  stopped by the scheduler", key)

    def record_failure(self, trial_id: str, given: TrialRecord, problem: str) -> None:
        """Record the error with which a trial failed finally."""
        self._ended.add(trial_id)
        record = self.records.get(given.key, given)
        logger.warning("%s  failed: %s", record.key, problem)
        self._put(replace(record, state="failed", problem=problem))

    def _put(self, record: TrialRecord) -> None:
        self.records[record.key] = record
        self._trial_store.write(record)

    def _log_report(self, record: TrialRecord, report: Report) -> None:
        values = ", ".join(f"{path}={value}" for path, value in record.values.items())
        top = best(self.records)
        best_text = (
            "" if top is None or top.final is None else f"; best so far {top.final.score:.4f}"
        )
        state = "" if record.state == "begun" else f"{record.state} "
        logger.info(
            "%s  step %d  %s%.4f  (%s)%s",
            *(record.key, report.global_step, state, report.score, values, best_text),
        )
