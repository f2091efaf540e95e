"""Judge that asks a language model behind a chat endpoint which negatives answer the query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rayembed_extras.synthesis.endpoint_settings import AskedModel
from rayembed_extras.synthesis.repair.settings import Judge

if TYPE_CHECKING:
    from rayembed.data.engine.parts import Part
    from rayembed.data.records import Record
    from rayembed_extras.synthesis.questions import Interview, Question
    from rayembed_extras.synthesis.repair.verdicts import JudgeVerdict, JudgeWork

ANSWERS_THE_QUERY = "answers the query"


class EndpointJudge(AskedModel, Judge):
    """Settings of a language model behind an OpenAI-compatible endpoint as judge (RLHN, arXiv
    2505.16967).

    Rows without a usable answer stay as they were.
    """

    kind: Literal["endpoint"] = "endpoint"

    @property
    def summary(self) -> str:
        """Name of the language model, for tables."""
        return self.llm.model

    def check_endpoint(self, setting: str, storage: str) -> None:
        """Check the endpoint's key and address, unless the model has answered before."""
        from rayembed_extras.synthesis.questions import check_endpoint

        check_endpoint(self, setting, storage)

    def inputs(self, fingerprint: Callable[[str], str]) -> dict[str, Any]:
        """Everything that decides the verdicts: prompt, sampling, and the model's names."""
        return {"kind": self.kind, **self.identity}

    def ready(self, work: JudgeWork) -> ReadAnswers:
        """Ask the model all questions that have no stored answer yet.

        Raises:
            AssetError: the endpoint refuses all requests, or does not answer any more.
            ConfigError: the key is not in the environment.
            DataError: too many rows have no usable answer.
        """
        from rayembed.data.engine.parts import read_records
        from rayembed_extras.synthesis.questions import Interview, asker, check_failed

        setting = f"data.datasets.{work.dataset}.repair.judge"
        ask = asker(self, setting)
        interview = Interview(self, work.context.seed, work.context.storage)
        count, failed, shown = 0, Counter[str](), ""
        for part in work.parts:
            questions = _questions(self, [r for r in read_records(part.path) if r.negatives])
            replies = interview.ask(f"judge {part.digest[:8]}", _group(part), questions, ask)
            count += len(replies)
            failed.update(reply.problem for reply in replies if reply.problem)
            shown = shown or next((reply.shown for reply in replies if reply.shown), "")
        of = f"rows of the data set {work.dataset!r}"
        check_failed(self.max_failed_share, setting, of, count, failed, repr(shown))
        return ReadAnswers(self, interview)


@dataclass(frozen=True)
class ReadAnswers:
    """Judges records by stored answers of the language model."""

    judge: EndpointJudge
    interview: Interview

    def __call__(self, part: Part, records: Sequence[Record], device: str) -> list[JudgeVerdict]:
        """Judge records by stored answers, without sending a request."""
        from rayembed_extras.synthesis.repair.verdicts import NO_NEGATIVE, JudgeVerdict

        asked = [record for record in records if record.negatives]
        replies = iter(self.interview.replies(_group(part), _questions(self.judge, asked)))
        verdicts = []
        for record in records:
            if not record.negatives:
                verdicts.append(JudgeVerdict(problem=NO_NEGATIVE))
                continue
            reply = next(replies)
            false = reply.value or frozenset()
            verdicts.append(
                JudgeVerdict(false, ANSWERS_THE_QUERY, problem=reply.problem, answer=reply.shown)
            )
        return verdicts


def _questions(judge: EndpointJudge, records: Sequence[Record]) -> list[Question[frozenset[int]]]:
    from rayembed_extras.synthesis.questions import Question
    from rayembed_extras.synthesis.repair.prompts import judge_prompt, read_relevant

    return [
        Question(
            judge_prompt(record, judge.max_words),
            partial(read_relevant, count=len(record.negatives)),
        )
        for record in records
    ]


def _group(part: Part) -> str:
    """Folder of the answers about a data file, named by the file's content."""
    return f"judge-{part.digest}"
