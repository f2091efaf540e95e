"""Measure how much a model's scores fall when unrelated text is appended to every text (Causal2Vec,
Table 3).

The tasks of the Wikipedia sample are scored twice: as they are, and with a few words of articles
that no task holds behind each text. The state of a last token then mostly reflects these words. The
paper appends to the LLM's input and does not say what; here every part of a model reads the noise.
"""

import copy
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from mteb.types import PromptType

from rayembed.assets.resolver import resolve_model
from rayembed.config.document import fingerprint
from rayembed.config.run import Run
from rayembed.config.types import Role
from rayembed.errors import ConfigError, DataError
from rayembed.evaluation.loaded_spec import loaded_spec, scores_of
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.prompts import ModelPrompts
from rayembed.evaluation.run_scores import decided, prompts_for
from rayembed.models.loading.backbones import num_positions
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import load_model
from rayembed_extras.wikipedia_sample.articles import Article
from rayembed_extras.wikipedia_sample.files import held_out_articles, summaries
from rayembed_extras.wikipedia_sample.references import sizes_of

logger = logging.getLogger(__name__)

TOKENS_PER_WORD = 2
"""Tokens reserved for each word of noise: English takes 1.35 on average, names take more."""

_TEXT_COLUMNS = ("text", "sentence1", "sentence2")


@dataclass(frozen=True)
class NoiseScores:
    """Main scores by task, without and with noise."""

    clean: Mapping[str, float]
    noisy: Mapping[str, float]


def noise_scores(
    reference: str | Path,
    run: Run,
    *,
    name: str,
    results_folder: str | Path,
    num_words: int,
    device: str = "cpu",
) -> NoiseScores:
    """Score a saved model on the run's tasks, with and without noise appended to every
    text.

    In both cases the model reads as many tokens more as the noise may take, so that the texts are
    the same; a warning counts texts whose noise is cut off all the same, for a model that reads
    less than the tasks have. Results are kept in the folder and not taken again.

    Args:
        run: its own sets are the tasks; instructions are those of its evaluation.
        num_words: number of words of the noise.

    Raises:
        AssetError, ArtifactError: the reference leads to no model.
        ConfigError: the run does not score the sample, or the model has learnt too few positions.
        DataError: there are no articles beside the held-out ones.
    """
    noise = Noise.of(run, num_words)
    tasks = [OwnTask(own) for own in run.evaluation.own_sets]
    folder = resolve_model(str(reference))
    weights = weights_fingerprint(folder)
    prompts = prompts_for(folder, run)
    model = load_model(folder, device=device)
    _make_room(model, num_words * TOKENS_PER_WORD)
    scores = []
    noisy = [NoisyTask(task, noise) for task in tasks]
    _warn_of_cut_noise(model, name, noisy, prompts)
    for factories in (tasks, noisy):
        made = [factory.load() for factory in factories]
        meta = model_meta(
            name,
            f"{weights}-{decided(made, prompts, {'words': num_words})[:8]}",
            embed_dim=model.dimensions[0],
            similarity_fn_name="cosine",
        )
        lengths = tuple(model.tokenizer.max_lengths.items())
        spec = loaded_spec(model, meta, prompts, lengths)
        scores.append(scores_of(spec, factories, results_folder, device))
    return NoiseScores(*scores)


@dataclass(frozen=True)
class Noise:
    """Source of noise: the first words of an article that no task contains, chosen by the text."""

    sources: Sequence[str]
    num_words: int
    seed: int

    @classmethod
    def of(cls, run: Run, num_words: int) -> "Noise":
        """Collect the noise texts for a run's tasks.

        Raises:
            ConfigError: the run does not score the sample.
            DataError: there are no articles beside the held-out ones.
        """
        sizes = sizes_of(run.evaluation.own_sets)
        if sizes is None:
            raise ConfigError(
                "evaluation.own_sets has no set of the Wikipedia sample, so there are no texts "
                "to append noise to; set evaluation.benchmarks=[wikipedia]"
            )
        held_out = {article.title for article in held_out_articles(sizes)}
        others = [
            a for a in summaries(sizes, "en") if a.title not in held_out and _long(a, num_words)
        ]
        if not others:
            raise DataError(
                "the noise is taken from articles that are not held out, but none of them has "
                f"{num_words} words; hold out fewer articles, or append fewer words"
            )
        return cls([a.extract for a in sorted(others, key=lambda a: a.title)], num_words, run.seed)

    def behind(self, text: str) -> str:
        """Append noise to a text: whole words from the beginning of an article.

        Which article is decided by the text and the seed.
        """
        source = random.Random(f"{self.seed}:{text}").choice(self.sources)
        return f"{text} {' '.join(source.split()[: self.num_words])}"

    def in_rows(self, rows: Dataset) -> Dataset:
        """Append noise to each text of the rows; ids, titles, grades and labels are unchanged."""
        columns = [column for column in _TEXT_COLUMNS if column in rows.column_names]
        return rows.map(
            lambda row: {column: self.behind(row[column]) for column in columns},
            keep_in_memory=True,
        )


@dataclass(frozen=True, eq=False)
class NoisyTask:
    """Creates a task of the run's own with noise appended to each of its texts."""

    clean: OwnTask
    noise: Noise

    @property
    def name(self) -> str:
        """Name of the task, the same as without noise."""
        return self.clean.name

    @property
    def num_texts(self) -> int:
        """Number of the task's texts, the same as without noise."""
        return self.clean.num_texts

    def load(self) -> Any:
        """Create the task, and append noise to its texts when they are loaded."""
        task = self.clean.load()
        load_clean = task.load_data

        def load_noisy(*args: Any, **options: Any) -> None:
            load_clean(*args, **options)
            for subset, splits in task.dataset.items():
                if isinstance(splits, Dataset):
                    task.dataset[subset] = self.noise.in_rows(splits)
                    continue
                for part in splits.values():
                    for side in ("corpus", "queries"):
                        part[side] = self.noise.in_rows(part[side])

        task.load_data = load_noisy
        revision = fingerprint([task.metadata.revision, self.noise.num_words, self.noise.seed])
        data = {**task.metadata.dataset, "revision": revision}
        task.metadata = task.metadata.model_copy(update={"dataset": data})
        return task


def _long(article: Article, num_words: int) -> bool:
    return len(article.extract.split()) >= num_words


def _make_room(model: Any, num_tokens: int) -> None:
    """Increase the maximum length of every part of the model by `num_tokens`, in place.

    Raises:
        ConfigError: a part has learnt too few positions.
    """
    own = getattr(model.tokenizer, "encoder", None)
    readers = {"backbone": model.tokenizer, "encoder": own or model.tokenizer}
    wanted = {}
    for name, part in model.parts.items():
        tokenizer, positions = readers[name], num_positions(part)
        lengths = {role: length + num_tokens for role, length in tokenizer.max_lengths.items()}
        if positions is not None and max(lengths.values()) > positions:
            raise ConfigError(
                f"with {num_tokens} tokens of noise the {name} would read {max(lengths.values())} "
                f"tokens, but it has learnt only {positions} positions; append fewer words"
            )
        wanted[name] = lengths
    model.tokenizer.max_lengths = wanted["backbone"]
    if own is not None:  # both stages of CDE share one
        model.tokenizer.encoder.max_lengths = wanted["encoder"]


def _warn_of_cut_noise(
    model: Any, name: str, tasks: Sequence[NoisyTask], prompts: ModelPrompts
) -> None:
    """Warn how many texts with noise are cut to the model's maximum length."""
    whole = copy.copy(model.tokenizer)
    whole.max_lengths = dict.fromkeys(whole.max_lengths, 1_000_000)
    number, cut = 0, 0
    for factory in tasks:
        task = factory.load()
        task.load_data()
        for role, texts in _texts(task.dataset):
            side = PromptType.document if role == "document" else PromptType.query
            head = prompts.shown(prompts.instruction(task.metadata, side))
            read, all_of_it = (
                t.with_prompts(texts, [head] * len(texts), role, allow_empty=True)
                for t in (model.tokenizer, whole)
            )
            number += len(texts)
            cut += sum(
                len(a["input_ids"]) < len(b["input_ids"])
                for a, b in zip(read, all_of_it, strict=True)
            )
    if cut:
        logger.warning(
            "%s: %d of %d texts with noise are longer than the model's maximum length, so the "
            "model does not read all noise and the loss is smaller; score shorter texts "
            "(max_length in the references of evaluation.own_sets)",
            *(name, cut, number),
        )


def _texts(dataset: Mapping[str, Any]) -> Iterator[tuple[Role, list[str]]]:
    """Yield the role and the texts of each text column in a task's data."""
    for splits in dataset.values():
        if isinstance(splits, Dataset):
            for column in _TEXT_COLUMNS:
                if column in splits.column_names:
                    yield "query", list(splits[column])
            continue
        for part in splits.values():
            documents = (f"{row['title']} {row['text']}".strip() for row in part["corpus"])
            yield "document", list(documents)
            yield "query", list(part["queries"]["text"])
