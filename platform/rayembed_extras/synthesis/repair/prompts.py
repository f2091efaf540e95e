"""Build the prompt that asks which documents answer a query, and parse the answer."""

from typing import Any

from rayembed.data.records import Record
from rayembed_extras.synthesis.answers import RejectedAnswer, first_usable
from rayembed_extras.synthesis.questions import cut
from rayembed_extras.synthesis.requests import ChatAnswer

_PROMPT = """\
You judge search results. Below are a query, documents that are known to answer it, and numbered \
candidate documents. Find the candidates that answer the query as well as the known ones do. A \
candidate that is only about the same subject does not answer it.
{task}
Query:
{query}

Known to answer it:
{positives}

Candidates:
{candidates}

Answer with one JSON object and nothing else: {{"relevant": [numbers of the candidates that answer \
the query]}}. If none does, answer {{"relevant": []}}."""


def judge_prompt(record: Record, max_words: int) -> str:
    """Build the user message about a record, with its negatives numbered from 1.

    Args:
        max_words: words of a text beyond which it is cut.
    """
    task = record.query_instruction
    return _PROMPT.format(
        task=f"\nThe search task: {task}\n" if task else "",
        query=cut(record.query, max_words),
        positives="\n\n".join(f"- {cut(text, max_words)}" for text in record.positives),
        candidates="\n\n".join(
            f"[{n}] {cut(one.text, max_words)}" for n, one in enumerate(record.negatives, 1)
        ),
    )


def read_relevant(answer: ChatAnswer, count: int) -> frozenset[int]:
    """Parse the indices, from 0, of the candidates that an answer names.

    Args:
        count: number of candidates.

    Raises:
        RejectedAnswer: the answer has no list of their numbers.
    """

    def read(value: dict[str, Any]) -> frozenset[int]:
        named = value.get("relevant")
        if not isinstance(named, list):
            raise RejectedAnswer("the answer has no list of relevant candidates")
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in named):
            raise RejectedAnswer("the list of relevant candidates has entries that are not numbers")
        if not all(1 <= n <= count for n in named):
            raise RejectedAnswer("the answer names a number that no candidate has")
        return frozenset(n - 1 for n in named)

    return first_usable(answer, read)
