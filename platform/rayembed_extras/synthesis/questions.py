"""Ask a model behind an endpoint questions about texts, and store its answers.

storage/data/answers/<model and sampling>/<group>/   every answer
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from rayembed.assets.storage import exists, join
from rayembed.config.document import fingerprint
from rayembed.data.hashes import text_hash
from rayembed.errors import ConfigError, DataError
from rayembed_extras.synthesis.answer_store import (
    NO_ANSWER,
    REFUSED,
    AnswerStore,
    Tried,
    ask_and_store,
    tried,
)
from rayembed_extras.synthesis.answers import ValueT
from rayembed_extras.synthesis.chat_endpoint import ask_endpoint, check_listens, read_key
from rayembed_extras.synthesis.endpoint_settings import AskedModel
from rayembed_extras.synthesis.requests import Ask, ChatAnswer, PromptRequest


@dataclass(frozen=True)
class Question(Generic[ValueT]):
    """A prompt, and the function that parses its answer."""

    prompt: str
    read: Callable[[ChatAnswer], ValueT]
    """Reads an answer; raises `RejectedAnswer` if it is unusable."""


@dataclass(frozen=True)
class Interview:
    """Asks one model questions and reuses answers that are already stored."""

    model: AskedModel
    seed: int
    storage: str

    @property
    def folder(self) -> str:
        """Folder of the model's stored answers."""
        return answers_folder(self.model, self.storage)

    def replies(
        self, group: str, questions: Sequence[Question[ValueT]]
    ) -> list[Tried[PromptRequest, ValueT]]:
        """Read the result of each question from stored answers, without sending a request.

        Args:
            group: names the folder in which these questions' answers lie.
        """
        answers = AnswerStore(self.folder).read(group)
        return [self._tried(group, question, answers) for question in questions]

    def ask(
        self, what: str, group: str, questions: Sequence[Question[ValueT]], ask: Ask
    ) -> list[Tried[PromptRequest, ValueT]]:
        """Ask until each question has a usable answer or no retry left; return the result
        of each.

        A request that got no answer, which was sent again `llm.max_resends` times, is left to the
        next job.

        Args:
            what: names the questions in the log.
            group: as of `replies`.
            questions: equal ones are asked once.
            ask: as `asker` makes it.

        Raises:
            AssetError: the endpoint refuses all requests, or does not answer any more.
        """
        kept = AnswerStore(self.folder)
        lost: dict[str, str] = {}
        for round_ in range(self.model.retries + 1):
            found = self.replies(group, questions)
            open_ = {r.key: r for one in found if (r := one.next) and r.key not in lost}
            if not open_:
                break
            label = f"{what}, retry {round_}" if round_ else what
            lost |= ask_and_store(label, list(open_.values()), ask, kept)
        found = self.replies(group, questions)
        for one in found:
            one.lost = "" if one.next is None else lost.get(one.next.key, "")
        return found

    def _tried(
        self, group: str, question: Question[ValueT], answers: Mapping[str, ChatAnswer]
    ) -> Tried[PromptRequest, ValueT]:
        prompt = question.prompt
        seeds = [
            text_hash(f"{self.seed}/{attempt}/{prompt}") % 2**31
            for attempt in range(self.model.retries + 1)
        ]
        return tried([PromptRequest(group, prompt, seed) for seed in seeds], answers, question.read)


def asker(model: AskedModel, setting: str) -> Ask:
    """Create the function that sends requests to the model from this process.

    Raises:
        ConfigError: the key is not in the environment.
    """
    return ask_endpoint(
        model.llm,
        read_key(model.llm, f"{setting}.llm"),
        temperature=model.temperature,
        top_p=1.0,
        max_tokens=model.max_tokens,
    )


def check_failed(
    share: float, setting: str, of: str, count: int, failed: Mapping[str, int], shown: str
) -> None:
    """Raise if too many texts have no usable answer.

    Args:
        share: of texts that may have none.
        setting: where the model's settings stand.
        of: what the texts are, for the message, such as `rows of the data set 'pairs'`.
        count: number of texts.
        failed: reason → texts without a usable answer.
        shown: such an answer, quoted.

    Raises:
        DataError: too many have none.
    """
    lost = Counter(failed).total()
    if lost <= share * count:
        return
    reasons = ", ".join(f"{number:,} × {reason}" for reason, number in failed.items())
    raise DataError(
        f"{lost:,} of {count:,} {of} have no usable answer ({reasons}), more than "
        f"{setting}.max_failed_share {share:g} allows; for instance {shown}. "
        f"{_advice(setting, failed)}"
    )


def _advice(setting: str, failed: Mapping[str, int]) -> str:
    """Advise what to change if texts have no usable answer, by the reasons."""
    away = sum(number for reason, number in failed.items() if reason.startswith(NO_ANSWER))
    found = ["What was answered is kept."]
    if away:
        found.append(
            f"The endpoint did not answer {away:,} of them: see to the server at {setting}.llm.url "
            "and its log, lower llm.concurrency or raise llm.timeout_seconds where it is too slow, "
            "and start the job again, which asks only for these."
        )
    if failed.get(REFUSED):
        found.append(
            f"The endpoint refused {failed[REFUSED]:,} requests: its answer says why; send_seed "
            f"and limit_name of {setting}.llm, and max_words, change what is sent."
        )
    if Counter(failed).total() > away + failed.get(REFUSED, 0):
        found.append(
            f"Where answers cannot be used, raise {setting}.retries or max_tokens, or take another "
            "model."
        )
    return " ".join(found)


def answers_folder(model: AskedModel, storage: str) -> str:
    """Folder of a model's stored answers, named by model and sampling settings."""
    named = [[model.llm.model, model.llm.revision], model.temperature, 1.0, model.max_tokens]
    return join(storage, "data", "answers", fingerprint(named))


def check_endpoint(model: AskedModel, setting: str, storage: str) -> None:
    """Check that the key is in the environment and that the address accepts connections.

    A model that was asked before may have answered everything: it is not looked for.

    Args:
        model: to be asked.
        setting: where its settings stand, for messages.
        storage: where answers of earlier jobs lie.

    Raises:
        ConfigError: the one is not, or the other does not.
    """
    if exists(answers_folder(model, storage)):
        return
    read_key(model.llm, f"{setting}.llm")
    try:
        check_listens(model.llm.url)
    except OSError as error:
        raise ConfigError(
            f"{setting}.llm.url = {model.llm.url!r}: nothing answers there ({error}); start the "
            "server, or name another address"
        ) from None


def cut(text: str, max_words: int) -> str:
    """Shorten a text to its first words, for a prompt."""
    words = text.split(maxsplit=max_words)
    return text if len(words) <= max_words else " ".join(words[:max_words]) + " …"
