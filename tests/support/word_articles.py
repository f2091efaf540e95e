"""Made-up articles of words that the tiny models' tokenizers know, some words for each topic."""

import json
import random

from made_up_articles import run_over
from tiny_models import LINES

WORDS = sorted({word.lower() for line in LINES for word in line.split() if word.isalpha()})
COUNT, HELD_OUT, TOPICS = 200, 120, ("Arts", "Life science", "Places")


def write_word_articles(path):
    """Articles of four sentences, two thirds of whose words are the topic's."""
    rng = random.Random(0)
    articles = {}
    for i in range(COUNT):
        number = i % len(TOPICS)
        own = WORDS[number :: len(TOPICS)]

        def words(count, own=own):
            return [rng.choice(own if rng.random() < 0.67 else WORDS) for _ in range(count)]

        sentences = [f"{' '.join(words(9)).capitalize()}." for _ in range(4)]
        articles[f"Title{i}"] = {
            "title": f"Title{i}",
            "extract": " ".join(sentences),
            "description": " ".join(words(6)),
            "topic": TOPICS[number],
        }
    path.write_text(json.dumps(articles))
    return path


def run_over_words(path, *, held_out=HELD_OUT, **settings):
    """A run that holds out most of the articles for its evaluation."""
    sizes = {"documents": 60, "queries": 40, "max_length": 60}
    return run_over(path, held_out=held_out, **sizes | settings)
