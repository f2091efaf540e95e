"""Prompts for the LLM in our own words; steps, fields and varied values follow NV-Embed, Tables 15
and 16.

Tasks come from an LLM's answer, so they are inserted verbatim and never used as format strings.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rayembed.config.document import fingerprint
from rayembed.data.hashes import text_hash
from rayembed_extras.synthesis.settings import PairKind


class _Wording(NamedTuple):
    """Texts from which the prompts of one kind of pairs are built. Rules have the placeholders of
    `VALUES`.
    """

    wanted: str
    """Description of the tasks for the first step."""
    task_rules: tuple[str, ...]
    patterns: tuple[str, ...]
    """Example tasks."""
    what: str
    """Noun for a task."""
    fields: Mapping[str, str]
    """Field of an example → its meaning: query, positive, negatives."""
    rules: tuple[str, ...]
    """Rules of an example."""


WORDINGS: Mapping[PairKind, _Wording] = {
    "short-long": _Wording(
        "search tasks, in which a short query is given and longer documents are wanted",
        (
            "Each task says what kind of query is given and what kind of document is wanted.",
            "Each task fits a wide range of queries: name no single person, product or event.",
            "Together the tasks have many kinds of queries and many kinds of documents.",
        ),
        (
            "Given a question about a tax rule, retrieve guidance pages that settle it",
            "Given the symptom of a machine's fault, retrieve repair manuals that explain it",
            "Given a historical hypothesis, retrieve essays that argue for or against it",
        ),
        "a search task",
        {
            "user_query": "what somebody enters, of the kind that the task names",
            "positive_document": "a document that serves this query",
            "hard_negative_document1": "a document that seems to serve the query and does not",
            "hard_negative_document2": "another document that seems to serve the query and does "
            "not",
        },
        (
            'The "user_query" is {query_type}, {query_length} long, and {clarity}. It holds only '
            "what the task says is given and does not repeat the task. Choose its subject freely.",
            "Write each document as if the query were not known: do not copy its wording. Parts of "
            'the "positive_document" may be about other things.',
            "Each document has at least {num_words} words.",
            'The "hard_negative_document1" may be of some use, but is clearly less useful or less '
            'complete than the "positive_document".',
            'The "hard_negative_document2" is about a subject that is close to the query\'s, but '
            "another one.",
            "No document says why it does or does not serve the query.",
            "It takes a {difficulty} education to understand the query and the documents.",
        ),
    ),
    "long-short": _Wording(
        "text classification tasks, in which a text is given and one of several labels is right",
        (
            "Each task says what kind of text is given and by what it is classified.",
            "Together the tasks have many domains and many ways to classify.",
        ),
        (
            "Classify a letter to a newspaper by the policy area that it is about",
            "Classify a bug report by the part of the software that is at fault",
        ),
        "a text classification task",
        {
            "input_text": "a text of the kind that the task names",
            "label": "the label that is right for this text",
            "misleading_label": "a label of the same task that is wrong for this text",
        },
        (
            'The "input_text" has {num_words} words. Express it in an unusual way.',
            'The "misleading_label" is one that the task really has and that one could think of, '
            'but it suits the "input_text" less than the "label" does.',
            'Neither label\'s wording occurs in the "input_text", which would give the answer '
            "away.",
            'The "input_text" is {clarity}, and it takes a {difficulty} education to understand '
            "it.",
        ),
    ),
    "short-short": _Wording(
        "text matching tasks, in which both the query and the text that matches it are very short: "
        "a phrase, or one or two sentences",
        (
            "Each task says what kind of text is given and what kind of text matches it.",
            "Each task fits a wide range of texts: name no single person, product or event.",
            "Together the tasks have many domains and many relations between the two texts.",
        ),
        (
            "Given the title of a recipe, retrieve titles of dishes that suit the same occasion",
            "Given a proverb, retrieve proverbs of other cultures with the same meaning",
        ),
        "a text matching task",
        {
            "input": "a short text of the kind that the task names",
            "positive": "a short text that matches it",
            "hard_negative": "a short text that is close to the input and does not match it",
        },
        (
            "Each text is a phrase, or one or two sentences, and holds only what the task says.",
            'The "positive" does not copy the wording of the "input".',
            'The "hard_negative" would be taken for a match by somebody who reads carelessly.',
            'The "input" is {clarity}, and it takes a {difficulty} education to understand the '
            "texts.",
        ),
    ),
}


def task_prompt(kind: PairKind, how_many: int, topic: str | None = None) -> str:
    """Build the prompt of the first step, which requests about `how_many` tasks of a kind as a JSON
    list.

    Args:
        kind: of the pairs that the tasks are for.
        how_many: tasks.
        topic: subject that all of them must be about; None: any.
    """
    asked = WORDINGS[kind]
    rules = [*asked.task_rules]
    if topic is not None:
        rules.append(f"All tasks have to do with this subject: {topic}")
    return "\n\n".join(
        (
            f"Think up about {how_many} different {asked.wanted}.",
            "Tasks of this sort, for example:\n" + _list(asked.patterns),
            "What to heed:\n" + _list(rules),
            f"Reply with a JSON list of about {how_many} strings, one sentence for each task, and "
            "with nothing before or after it. Be inventive, and repeat no task.",
        )
    )


def example_prompt(
    kind: PairKind, task: str, values: Mapping[str, str], language: str = "English"
) -> str:
    """Build the prompt of the second step, which requests one example of the task as a JSON
    object.

    Args:
        kind: of the pair.
        task: one sentence of the first step.
        values: of the kind's placeholders.
        language: of the example's texts, by its English name.
    """
    asked = WORDINGS[kind]
    rules = [rule.format(**values) for rule in asked.rules]
    return "\n\n".join(
        (
            f"This is {asked.what}: {task}",
            "Write one example of it, as a JSON object with these fields, all of them strings:\n"
            + _list(f'"{name}": {meaning}' for name, meaning in asked.fields.items()),
            "What to heed:\n" + _list([*rules, f"All texts are in {language}."]),
            "Reply with the JSON object and with nothing before or after it. Be inventive.",
        )
    )


def prompts_fingerprint(kind: PairKind) -> str:
    """Fingerprint of a kind's prompt texts and placeholder values."""
    names = {name: f"{{{name}}}" for name in VALUES[kind]}
    return fingerprint(
        [
            task_prompt(kind, 0, "{topic}"),
            example_prompt(kind, "{task}", names, "{language}"),
            {name: list(values) for name, values in VALUES[kind].items()},
        ]
    )


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


QUERY_TYPES = ("extremely long-tail", "long-tail", "common")
QUERY_LENGTHS = ("less than 5 words", "5 to 15 words", "at least 10 words")
DIFFICULTIES = ("high school", "college", "PhD")
CLARITIES = ("clear", "understandable with some effort", "ambiguous")
DOCUMENT_WORDS = ("50", "100", "200", "300", "400", "500")
"""Minimum words of each document in a short-long example."""
INPUT_WORDS = ("less than 10", "at least 10", "at least 50", "at least 100", "at least 200")
"""Length of the text in a long-short example."""

VALUES: Mapping[PairKind, Mapping[str, tuple[str, ...]]] = {
    "short-long": {
        "query_type": QUERY_TYPES,
        "query_length": QUERY_LENGTHS,
        "difficulty": DIFFICULTIES,
        "clarity": CLARITIES,
        "num_words": DOCUMENT_WORDS,
    },
    "long-short": {
        "num_words": INPUT_WORDS,
        "difficulty": DIFFICULTIES,
        "clarity": CLARITIES,
    },
    # The paper prints no table of this kind: the sets that both of its tables have.
    "short-short": {"difficulty": DIFFICULTIES, "clarity": CLARITIES},
}
"""Kind → placeholder → its values."""


def draw(kind: PairKind, seed: int, number: int) -> dict[str, str]:
    """Draw a value for each placeholder, uniformly, for the example with this number."""
    return {
        name: values[text_hash(f"{seed}/{kind}/{number}/{name}") % len(values)]
        for name, values in VALUES[kind].items()
    }


def draw_language(languages: Mapping[str, str], kind: PairKind, seed: int, number: int) -> str:
    """Draw the language code of the example with this number."""
    codes = sorted(languages)
    return codes[text_hash(f"{seed}/{kind}/{number}/language") % len(codes)]


def least_words(kind: PairKind, values: Mapping[str, str]) -> int:
    """Minimum number of words in the example's long text; 0 without a limit."""
    words = values.get("num_words", "")
    if kind == "short-long":
        return int(words)
    return int(words.rsplit(" ", 1)[1]) if words.startswith("at least ") else 0
