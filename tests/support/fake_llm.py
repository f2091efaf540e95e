"""A language model of a few lines: the same text for the same prompt and seed, some of it broken.

It reads from the prompt what is asked for, as a model does: a list of tasks, or the named fields.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rayembed_extras.synthesis.requests import Answer, Request

NOUNS = ("river", "engine", "treaty", "recipe", "enzyme", "orbit", "violin", "glacier", "ledger")


def write(prompt: str, seed: int, *, broken_share: float = 0.0) -> str:
    """The answer's text; a share of the examples, chosen by the seed, is broken in some way."""
    draw = random.Random(f"{seed} {prompt}")
    asked = re.search(r"Think up about (\d+)", prompt)
    if asked:
        return _tasks(int(asked[1]), draw)
    fields = dict.fromkeys(re.findall(r'^- "(\w+)":', prompt, re.MULTILINE))
    long = max([4, *map(int, re.findall(r"at least (\d+) words", prompt))])
    number = draw.getrandbits(48)
    example = {
        name: " ".join([name, str(number), *(draw.choice(NOUNS) for _ in range(long))])
        for name in fields
    }
    if draw.random() < broken_share:
        return _broken(example, draw)
    return draw.choice(("{}", "Here it is:\n```json\n{}\n```\nEnjoy!")).format(json.dumps(example))


def _tasks(how_many: int, draw: random.Random) -> str:
    tasks = [
        f"Given a {draw.choice(NOUNS)}, retrieve the {draw.choice(NOUNS)} of item {i}"
        for i in (draw.randrange(10_000) for _ in range(how_many))
    ]
    return json.dumps([*tasks, tasks[0].upper() + "!"])  # one is repeated


def _broken(example: dict[str, str], draw: random.Random) -> str:
    text = json.dumps(example)
    match draw.randrange(4):
        case 0:
            return "I cannot help with that."
        case 1:
            return text[: len(text) // 2]
        case 2:
            return json.dumps(dict(list(example.items())[:-1]))
    first, second = list(example)[:2]
    return json.dumps(example | {second: example[first]})


class FakeLLM:
    """An `Ask` in this process that counts what it is asked."""

    def __init__(
        self,
        broken_share: float = 0.0,
        answer: Callable[[Request], Answer | None] = lambda request: None,
        dies_after: int | None = None,
    ) -> None:
        self.broken_share = broken_share
        self.answer = answer
        """Takes the place of what would be written, where it gives something."""
        self.dies_after = dies_after
        self.asked: Counter[str] = Counter()

    def __call__(self, requests: Sequence[Request]) -> Iterator[Answer]:
        # In another order than asked: answers come as they are ready.
        for request in sorted(requests, key=lambda r: r.sampling_seed):
            if self.dies_after is not None and self.asked.total() >= self.dies_after:
                raise KeyboardInterrupt
            self.asked[request.id] += 1
            given = self.answer(request)
            yield given if given is not None else self._written(request)

    def _written(self, request: Request) -> Answer:
        text = write(request.prompt, request.sampling_seed, broken_share=self.broken_share)
        return Answer(request.id, request.group, request.key, "answered", text, answer_tokens=7)


def failed(request: Request, outcome: str, problem: str) -> Answer:
    """An answer without a text."""
    return Answer(request.id, request.group, request.key, outcome, problem=problem)  # type: ignore[arg-type]
