"""Make synthetic pairs: a small language model writes a question about each of some
articles.

SmolLM2-135M-Instruct, whose first layers NV-Embed's small run trains, reads the beginning of
English articles that the sample trains on. It is too small for the two steps of
`rayembed_extras.synthesis`, which ask for tasks and for JSON; a question is what it can write. The
pairs are one file in a storage, below which a run names it: neither the run's name nor its
fingerprint depends on where that is.
"""

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence

from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.storage import exists, join, write_atomic
from rayembed.config.data import DatasetConfig
from rayembed.config.document import fingerprint
from rayembed.config.run import Run
from rayembed.config.settings import changed
from rayembed.data.hashes import seeded_hash
from rayembed.data.sources.pairs import PairsSource
from rayembed.display.progress import bar, doing, duration
from rayembed.errors import DataError
from rayembed.machine.cores import num_cores
from rayembed.recipes.sample import SMOLLM2, RowFile, Wikipedia
from rayembed_extras.synthesis.answers import normalised
from rayembed_extras.wikipedia_sample.articles import Article
from rayembed_extras.wikipedia_sample.files import summaries
from rayembed_extras.wikipedia_sample.rows import Rejected
from rayembed_extras.wikipedia_sample.tasks import cut, words_of_tokens
from rayembed_papers.directions.small import LENGTH

logger = logging.getLogger(__name__)

DOCUMENTS = 1200
"""Number of articles for which a question is generated."""

SAMPLES = 1000
"""Number of synthetic pairs for training, the same as the sample's sentences."""

_WEIGHT = 0.3
"""Weight of the pairs in the stage, next to 2 for sentences and 1 for descriptions: a tenth. Of the
paper's stage they are a few percent."""

_SAMPLE = Wikipedia()
_MODEL = SMOLLM2

_TASK = "Given a question, retrieve the article that answers it"

CODE_VERSION = 1
"""Version of selection, generation and cleaning; raise it when the same
prompt yields other pairs."""

_ASK = "Write one short question that the text answers."
_EXAMPLES = (
    (
        "The okapi is a mammal of the Democratic Republic of the Congo. Although it has striped "
        "markings, it is most closely related to the giraffe.",
        "Which striped animal of the Congo is related to the giraffe?",
    ),
    (
        "Basalt is an igneous rock formed from the rapid cooling of lava that is rich in magnesium "
        "and iron.",
        "How does basalt form?",
    ),
)
"""Example texts with questions; without examples the model answers instead of asking."""

_WORDS = words_of_tokens(LENGTH)
"""Words of an article in the prompt: about as many as a run reads of it."""

_NEW_TOKENS = 24
_BATCH = 40

_MIN_WORDS = 3
_LEAST_SHARE = 0.5
"""Minimum share of articles with a usable question; below it the model is assumed to be broken."""

_SPEED_SHARE = 0.25
"""Share of a product's speed that generation reaches: each new token reads all weights. Measured:
142 CPU seconds for 100 articles on an Intel Xeon with AMX."""

_TOKENS = 160
"""Tokens of a question, including the prompt's."""

_PARAMETERS = 134.5e6

_NO_SUBJECTS = (
    "about and answer are between called can common definition did difference does first for from "
    "had has have her his how its known main many meaning most name not one origin purpose "
    "question sentence some term text that the their there they this title two type used was were "
    "what when where which while who why with word would"
)
"""Words of three letters and more that are not the subject of a question."""

_KEY = fingerprint(
    [
        *(CODE_VERSION, _MODEL, _SAMPLE.pairs("description").path, DOCUMENTS),
        *(_ASK, _EXAMPLES, _WORDS, _NEW_TOKENS, _BATCH),
    ]
)

PAIRS_FILE = f"papers/synthetic-smollm2-135m-{DOCUMENTS}-{_KEY[:8]}.jsonl"
"""Path of the pairs below a storage. The name has all that decides what is written: model, number
of texts, prompt. Machines whose float32 differs in the last bits may word some questions otherwise.
"""


def with_questions(run: Run, name: str) -> Run:
    """Copy a run with the synthetic pairs as a further data set of its first stage.

    NV-Embed's Table 4 compares synthetic data in stage one. The stage takes as many steps as
    without them, and negatives are mined for them as for its other pairs.
    """
    stage, *others = run.stages
    beside = next(one for one in run.data.datasets if one.name in stage.datasets)
    pairs = DatasetConfig(
        name="synthetic",
        source=PairsSource(path=PAIRS_FILE, id="id"),
        query_instruction=_TASK,
        num_samples=SAMPLES,
        mining=beside.mining,
    )
    return changed(
        run,
        name=name,
        data=changed(run.data, datasets=(*run.data.datasets, pairs)),
        stages=(changed(stage, datasets={**stage.datasets, pairs.name: _WEIGHT}), *others),
    )


def seconds_left(storage: str) -> float:
    """Estimate the seconds of `write_pairs` on this machine's cores; 0 if the pairs exist."""
    from rayembed.machine.hardware import product_speed  # which imports torch

    if exists(join(storage, PAIRS_FILE)):
        return 0.0
    speed = _SPEED_SHARE * num_cores() * product_speed("float32")
    return DOCUMENTS * _TOKENS * 2 * _PARAMETERS / speed


def write_pairs(storage: str) -> None:
    """Write the pairs to their file in a storage, atomically, unless it exists.

    Raises:
        AssetError: the model or the sample cannot be had.
        DataError: the model's answers are no questions.
        StorageError: the file cannot be written.
    """
    path = join(storage, PAIRS_FILE)
    if exists(path):
        return
    articles = _articles()
    logger.info(
        "%s: SmolLM2-135M writes a question about each of %s articles, which takes about %.0f "
        "minutes",
        *(path, f"{len(articles):,}", seconds_left(storage) / 60),
    )
    began = time.monotonic()
    answers = _answers([cut(article.extract, _WORDS) for article, _ in articles])
    rows, refused = _pairs(articles, answers)
    reasons = "; ".join(f"{count} × {reason}" for reason, count in refused.most_common()) or "none"
    if len(rows) < _LEAST_SHARE * len(articles):
        raise DataError(
            f"of {len(articles)} answers of {_MODEL} only {len(rows)} are usable questions, too "
            f"few ({reasons}); the last answer is {answers[-1]!r}. Other versions of torch or "
            "transformers may compute the model's answers differently"
        )
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomic(path, "".join(lines).encode())
    logger.info(
        "%s: %s pairs written in %s; unusable answers: %s",
        *(path, f"{len(rows):,}", duration(time.monotonic() - began), reasons),
    )


def _articles() -> list[tuple[Article, str]]:
    """Select training articles to ask about, each with its title-masked text.

    Evaluation touches none of them: they are those of the rows of descriptions.
    """
    with resolve(_SAMPLE.pairs("description").path).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows.sort(key=lambda row: (seeded_hash(_SAMPLE.seed, "synthetic", row["id"]), row["id"]))
    part = RowFile(kind="description", source=_SAMPLE.source)
    by_title = {article.title: article for article in summaries(part, "en")}
    return [(by_title[row["id"]], row["positive"]) for row in rows[:DOCUMENTS]]


def _pairs(
    articles: Sequence[tuple[Article, str]], answers: Sequence[str]
) -> tuple[list[dict[str, str]], Counter[str]]:
    """Turn usable answers into rows; also return reason → number of unusable answers.

    A question may name its article, as people do; the text has no title, as all of the sample's.
    """
    rows: dict[str, dict[str, str]] = {}
    refused: Counter[str] = Counter()
    for (article, positive), answer in zip(articles, answers, strict=True):
        found = question_in(answer, f"{article.title} {article.extract}")
        if isinstance(found, str) and normalised(found) in rows:
            found = Rejected("asked of another article")
        if isinstance(found, Rejected):
            refused[found.reason] += 1
        else:
            row = {"id": article.title, "query": found, "positive": positive}
            rows[normalised(found)] = row
    return list(rows.values()), refused


def _answers(texts: Sequence[str]) -> list[str]:
    """Ask the model for a question about each text."""
    from rayembed_papers.directions.chat_model import answers_of  # which imports torch

    began, found = time.monotonic(), dict[int, str]()

    def progress_line() -> str:
        done, seconds = len(found), time.monotonic() - began
        so_far = f"questions: {bar(done, len(texts))} {done:,}/{len(texts):,}"
        if not done:
            return so_far
        left = duration(seconds / done * (len(texts) - done))
        return f"{so_far}, {60 * done / seconds:.0f} a minute, {left} left"

    asked = answers_of(
        resolve_model(_MODEL),
        [_conversation(text) for text in texts],
        new_tokens=_NEW_TOKENS,
        batch_size=_BATCH,
        stop="?",
    )
    with doing(progress_line):
        for place, answer in asked:
            found[place] = answer
    return [found[place] for place in range(len(texts))]


def _conversation(text: str) -> list[dict[str, str]]:
    """Build the prompt, with the examples as earlier messages and answers."""
    messages = [{"role": "system", "content": "You write questions."}]
    for known, question in _EXAMPLES:
        messages += [_request(known), {"role": "assistant", "content": question}]
    return [*messages, _request(text)]


def _request(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"Text: {text}\n\n{_ASK}"}


def question_in(answer: str, text: str) -> str | Rejected:
    """Extract the question from a model's answer about a text, or return why the answer is
    unusable.

    It is the first line up to its first question mark.
    """
    line = next((line for line in answer.splitlines() if line.strip()), "")
    asked, mark, _ = line.partition("?")
    asked = re.sub(r"^\W*(question|q)\s*:", "", asked, flags=re.IGNORECASE)
    question = " ".join(asked.split()).lstrip("\"'“‘ ") + "?"
    words = normalised(question).split()
    if not mark:
        return Rejected("no question")
    if len(words) < _MIN_WORDS:
        return Rejected("too short")
    if words in [normalised(example).split() for _, example in _EXAMPLES]:
        return Rejected("that of the prompt's example")
    if normalised(question) in normalised(text):
        return Rejected("copied from the text")
    if not _subjects(words) & _subjects(normalised(text).split()):
        return Rejected("about nothing in the text")
    return question


def _subjects(words: Sequence[str]) -> set[str]:
    """Beginnings of words that may be a text's subject, cut so that singular and plural are
    equal.
    """
    excluded = _NO_SUBJECTS.split()
    return {word[:5] for word in words if len(word) >= 3 and word not in excluded}
