"""First step of a synthesis: ask an LLM for distinct tasks."""

import logging
from collections import Counter
from dataclasses import asdict, dataclass, field

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import exists, join
from rayembed.config.document import fingerprint
from rayembed.errors import DataError
from rayembed_extras.synthesis.answer_store import AnswerStore, ask_and_store, tried
from rayembed_extras.synthesis.answers import normalised, read_tasks
from rayembed_extras.synthesis.prompts import prompts_fingerprint
from rayembed_extras.synthesis.requests import Ask, TaskRequest
from rayembed_extras.synthesis.settings import PairKind, SynthesisConfig

log = logging.getLogger(__name__)

_REMEDY = (
    "Remove this file alone and start the job again, which reads the tasks of the kept answers"
)

CODE_VERSION = 1
"""Code version; raise it when the same answers yield other tasks or records of them."""


@dataclass
class Tasks:
    """Distinct tasks of one kind of pairs, in the order of their requests."""

    wanted: int
    asked: int = 0
    """Number of requests."""
    texts: list[str] = field(default_factory=list)
    """Task texts, at most `wanted`."""
    repeated: int = 0
    """Number of tasks equal to another one up to case, punctuation and spaces."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Reason → number of rejected answers."""

    @property
    def lacking(self) -> int:
        """Number of missing tasks."""
        return self.wanted - len(self.texts)


def find_tasks(
    config: SynthesisConfig, seed: int, ask: Ask, kept: AnswerStore
) -> dict[PairKind, Tasks]:
    """Ask for tasks until each kind of pairs has as many distinct ones as its examples
    need.

    Each round asks for as many as are lacking, at the rate at which the answers so far gave new
    ones. Requests are numbered through and tasks taken in their order, so that more tasks begin
    with the same ones. What was found is written down: an answer that comes after all must not
    put other tasks under the examples that are there.

    Raises:
        AssetError: as `ask_and_store`.
        DataError: there are too few after the last round.
    """
    files = {kind: _file(config, kind, seed, kept.folder) for kind in config.examples}
    found = {
        kind: Tasks(**read_json(files[kind], _REMEDY))
        if exists(files[kind])
        else Tasks(-(-wanted // config.examples_per_task))
        for kind, wanted in config.examples.items()
    }
    for round_ in range(config.task_rounds):
        lacking = {kind: tasks for kind, tasks in found.items() if tasks.lacking}
        if not lacking:
            break
        for tasks in lacking.values():
            tasks.asked += _more(tasks, config.tasks_per_request)
        requests = [
            request
            for kind, tasks in lacking.items()
            for request in _requests(config, kind, seed, tasks.asked)
        ]
        what = "tasks" if round_ == 0 else f"tasks, round {round_ + 1}"
        known = kept.answers(requests)
        open_ = [request for request in requests if request.key not in known]
        # Where all of a round are lost, another round would be too.
        ask_and_store(what, open_, ask, kept, lost_in_a_row=len(open_))
        for kind, tasks in lacking.items():
            found[kind] = _read(config, kind, seed, kept, tasks)
    for kind, tasks in found.items():
        log.info(
            "tasks of the kind %s: %d different tasks, %d repeated tasks",
            kind,
            len(tasks.texts),
            tasks.repeated,
        )
        if tasks.lacking:
            raise DataError(_too_few(config, kind, tasks))
        if not exists(files[kind]):
            write_json(files[kind], asdict(tasks))
    return found


def _file(config: SynthesisConfig, kind: PairKind, seed: int, folder: str) -> str:
    """Path of the file that stores the tasks, named by the settings and the seed that
    decide them.
    """
    wanted = -(-config.examples[kind] // config.examples_per_task)
    prompt = prompts_fingerprint(kind)
    decides = [CODE_VERSION, prompt, seed, wanted, config.tasks_per_request, list(config.topics)]
    return join(folder, f"{kind}-tasks-{fingerprint(decides)}.json")


def _more(tasks: Tasks, per_request: int) -> int:
    """Compute the number of requests in the next round, at most twice the number of all earlier
    ones.
    """
    if not tasks.asked:
        return -(-tasks.lacking // per_request)
    new_per_request = max(len(tasks.texts) / tasks.asked, 1.0)
    return min(int(-(-tasks.lacking // new_per_request)), 2 * tasks.asked)


def _requests(config: SynthesisConfig, kind: PairKind, seed: int, number: int) -> list[TaskRequest]:
    topics = config.topics
    return [
        TaskRequest(
            kind, i, seed, config.tasks_per_request, topics[i % len(topics)] if topics else None
        )
        for i in range(number)
    ]


def _read(
    config: SynthesisConfig, kind: PairKind, seed: int, kept: AnswerStore, before: Tasks
) -> Tasks:
    tasks = Tasks(before.wanted, before.asked)
    rejected: Counter[str] = Counter()
    seen: set[str] = set()
    requests = _requests(config, kind, seed, before.asked)
    answers = kept.answers(requests)
    for request in requests:
        found = tried([request], answers, read_tasks)
        if found.value is None:
            rejected[found.problem] += 1
        for text in found.value or ():
            form = normalised(text)
            if form in seen:
                tasks.repeated += 1
                continue
            seen.add(form)
            tasks.texts.append(text)
    del tasks.texts[tasks.wanted :]
    tasks.rejected = dict(rejected)
    return tasks


def _too_few(config: SynthesisConfig, kind: PairKind, tasks: Tasks) -> str:
    reasons = "; ".join(
        f"{count} × {reason}" for reason, count in Counter(tasks.rejected).most_common(3)
    )
    return (
        f"{tasks.asked} requests in synthesis.task_rounds={config.task_rounds} rounds gave only "
        f"{len(tasks.texts)} different tasks of the kind {kind!r}, but {tasks.wanted} are wanted; "
        f"{tasks.repeated} tasks were repeated"
        + (f", {sum(tasks.rejected.values())} answers were unusable ({reasons})" if reasons else "")
        + ". Raise synthesis.task_rounds or temperature, give synthesis.topics, raise "
        f"examples_per_task, or ask for fewer: synthesis.examples.{kind}"
    )
