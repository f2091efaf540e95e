"""Measure how context documents of one topic affect the scores on texts of another (CDE,
Figure 7).

"We randomly sample inputs from D from a domain and use them as input to the downstream task d"
(arXiv 2410.02525, section 7). The paper's domains are forums of CQADupstack; here they are the
topics of the Wikipedia sample, each with a retrieval task over its own held-out articles alone.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rayembed.config.evaluation import Prompts
from rayembed.config.run import Run
from rayembed.config.settings import changed, nearest
from rayembed.errors import ConfigError, DataError
from rayembed.evaluation.loaded_spec import loaded_spec, scores_of
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.pooled.encoding_worker import DrawnContext, draw_context
from rayembed.evaluation.rayembed_spec import lengths_read
from rayembed.evaluation.run_scores import decided, prompts_for
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.passes.encoding import encode_context
from rayembed.recipes.sample import RETRIEVAL_TASKS, own_sets
from rayembed_extras.wikipedia_sample.articles import NO_TOPIC
from rayembed_extras.wikipedia_sample.files import held_out_articles
from rayembed_extras.wikipedia_sample.references import sizes_of
from rayembed_papers.context.sizes import contextual_folder, documents_of, load_contextual

logger = logging.getLogger(__name__)

EVERY_TOPIC = "all topics"
NO_CONTEXT = "no context"
"""Contexts other than a single topic: documents of all topics, and the null token."""

NEAR = 0.01
"""Distance below the best score of a row within which a score is marked, as in the paper."""

MIN_DOCUMENTS = 20
"""Minimum documents of a scored topic; fewer are not meaningful."""


@dataclass(frozen=True)
class TopicScores:
    """Scores of each topic's texts in each context."""

    task: str
    scores: Mapping[str, Mapping[str, tuple[float, ...]]]
    """Scored topic → context → score with each draw of its documents."""

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics whose texts are scored; each also serves as a context."""
        return tuple(self.scores)

    @property
    def contexts(self) -> tuple[str, ...]:
        """Labels of all contexts: each topic, documents of all topics, and no context."""
        return (*self.topics, EVERY_TOPIC, NO_CONTEXT)

    def mean(self, topic: str, context: str) -> float:
        """Mean score of a topic's texts in a context, over draws of its documents."""
        return fmean(self.scores[topic][context])

    def best(self, topic: str) -> float:
        """Highest mean score of a topic's texts in any context."""
        return max(self.mean(topic, context) for context in self.contexts)

    def near_best(self, topic: str, context: str) -> bool:
        """Whether the mean score in a context is within one percentage point of the topic's
        best.
        """
        return self.mean(topic, context) >= self.best(topic) - NEAR

    def mean_of(self, context: str) -> float:
        """Mean score over all topics in the context `EVERY_TOPIC` or `NO_CONTEXT`."""
        return fmean(self.mean(topic, context) for topic in self.topics)

    @property
    def mean_of_own(self) -> float:
        """Mean score over all topics, each with its own documents as context."""
        return fmean(self.mean(topic, topic) for topic in self.topics)

    @property
    def mean_of_others(self) -> float:
        """Mean score over all topics, each with the documents of every other topic as context."""
        return fmean(self.mean(t, c) for t in self.topics for c in self.topics if t != c)


def topic_scores(
    reference: str | Path,
    run: Run,
    *,
    name: str,
    results_folder: str | Path,
    task: str,
    draws: int,
    device: str = "cpu",
) -> TopicScores:
    """Score a saved model on each topic's task, with documents of each topic as context.

    Results are kept in the folder and not taken again.

    Args:
        run: its own sets are the tasks; instructions are those of its evaluation.
        task: a retrieval task of the sample.
        draws: of each topic's context documents, as many as the model takes.

    Raises:
        AssetError, ArtifactError: the reference leads to no model, or to one without context.
        ConfigError: no such task, or no source.
        DataError: fewer than two topics have enough held-out articles.
    """
    folder, places = contextual_folder(str(reference))
    tasks = topic_tasks(run, task)
    weights = weights_fingerprint(folder)
    names = {topic: factory.name for topic, factory in tasks.items()}
    made = [factory.load() for factory in tasks.values()]
    instruction = run.evaluation.instructions.get(task)
    given = {} if instruction is None else dict.fromkeys(names.values(), instruction)
    prompts = replace(prompts_for(folder, run), settings=Prompts(instructions=given))
    model = load_contextual(folder, device)
    found: dict[str, dict[str, list[float]]] = {topic: {} for topic in tasks}
    wanted = list(_contexts(tasks, places, run.seed, draws))
    for number, (label, drawn) in enumerate(wanted, start=1):
        logger.info(
            "measuring with the context %s (measurement %d of %d)", label, number, len(wanted)
        )
        context = model.no_context()
        if drawn.documents:
            context = encode_context(model, drawn.documents)
        model.set_corpus(context)
        meta = model_meta(
            name,
            f"{weights}-{decided(made, prompts, {'context': drawn.name})[:8]}",
            embed_dim=model.dimensions[0],
            similarity_fn_name="cosine",
        )
        lengths = lengths_read(model.config)
        # Behind the corpus that was just set.
        spec = loaded_spec(model, meta, prompts, lengths, num_context=0)
        scores = scores_of(spec, list(tasks.values()), results_folder, device)
        for topic in tasks:
            found[topic].setdefault(label, []).append(scores[names[topic]])
    return TopicScores(
        task,
        {
            topic: {label: tuple(values) for label, values in by_context.items()}
            for topic, by_context in found.items()
        },
    )


def topic_tasks(run: Run, task: str) -> dict[str, OwnTask]:
    """Make a retrieval task for each topic, with only its held-out articles.

    Raises:
        ConfigError: no such retrieval task, or no source.
        DataError: fewer than two topics have enough articles.
    """
    if task not in RETRIEVAL_TASKS:
        raise ConfigError(f"no retrieval task {task!r}; {nearest(task, RETRIEVAL_TASKS)}")
    sizes = sizes_of(run.evaluation.own_sets)
    if sizes is None:
        raise ConfigError(
            "evaluation.own_sets has no set of the Wikipedia sample, but this job scores its "
            "topics; set evaluation.benchmarks=[wikipedia]"
        )
    articles = held_out_articles(sizes)
    counts = Counter(a.topic for a in articles if a.topic and a.topic != NO_TOPIC)
    large = [topic for topic in sorted(counts) if counts[topic] >= MIN_DOCUMENTS]
    if len(large) < 2:
        raise DataError(
            f"the {len(articles)} held-out articles have {len(large)} topics with at least "
            f"{MIN_DOCUMENTS} articles, but 2 such topics are needed; hold out as many articles "
            "as when the model was trained"
        )
    found = {}
    for topic in large:
        (own,) = own_sets(changed(sizes, topic=topic), (task,))
        letters = "".join(character for character in topic.title() if character.isalnum())
        found[topic] = OwnTask(changed(own, name=f"{task}-{letters}"))
    return found


def _contexts(
    tasks: Mapping[str, OwnTask], places: int, seed: int, draws: int
) -> Iterator[tuple[str, DrawnContext]]:
    """Yield label and drawn documents of each context for every draw; the empty context is drawn
    once.
    """
    documents: dict[str, Sequence[str]] = {
        topic: documents_of(factory) for topic, factory in tasks.items()
    }
    every = [text for texts in documents.values() for text in texts]
    for draw in range(draws):
        for label, texts in (*documents.items(), (EVERY_TOPIC, every)):
            yield label, draw_context(texts, places, seed=seed + draw)
    yield NO_CONTEXT, draw_context([], places, seed=seed)
