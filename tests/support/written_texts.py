"""A language model of a few lines: the same text for the same prompt and seed, some of it broken.

It reads from the prompt what is asked for, as a model does: a list of tasks, or the named fields.
"""

import json
import random
import re

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
