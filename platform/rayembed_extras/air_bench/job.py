"""Searching one AIR-Bench data set: a picklable piece of an evaluation.

One job does all splits of a data set. They share the corpus, which is most of the work, and so it
is indexed and searched once, for the queries of all splits together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from mteb.models import ModelMeta

from rayembed.errors import ArtifactError, DataError, require_packages
from rayembed_extras.air_bench.catalogue import AirBenchDataset, Split, air_bench_datasets
from rayembed_extras.air_bench.hub_data import AirBenchData, load_data, load_labels, unknown_ids
from rayembed_extras.air_bench.results import DEPTH, AirBenchResults, checked, open_results
from rayembed_extras.air_bench.scores import retrieval_scores
from rayembed_extras.air_bench.task import MAIN_SCORES, query_instruction, task_metadata

AIR_BENCH_RESULT = "air_bench_result"
"""Key of the outcome of `AirBenchJob.run`."""


@dataclass(frozen=True)
class AirBenchJob:
    """Makes the result files of a data set, and scores its dev split if it has one."""

    dataset: AirBenchDataset
    """Data set, with the requested splits."""
    folder: str
    """Folder of all results of AIR-Bench (`results.py`), local or in object storage."""
    retriever: str = ""
    """Name of the model in the results; empty: the model's own name."""
    cache: str | None = None
    """Cache of the data sets; None: the default of `datasets`."""
    batch_size: int = 1024
    """Texts that are handed to the model at once, for models that do not choose it themselves."""

    @property
    def name(self) -> str:
        """Name of the job and of mteb's task, such as `AIR-Bench_24.05_qa_arxiv_en_default`."""
        return f"{self.dataset.version}_{self.dataset.label}"

    @property
    def num_texts(self) -> int:
        """Documents and queries, as published."""
        return self.dataset.num_documents + sum(self.dataset.num_queries.values())

    def finished(self, meta: ModelMeta) -> bool:
        """Whether all splits have results of this model, so that `run` would not embed a text.

        Raises:
            ArtifactError: the results there are of another model or revision.
        """
        results = open_results(self.folder, self.dataset.version, meta, self.retriever)
        return not self._missing(results)

    def run(self, model: Any) -> dict[str, Any]:
        """Search for what is missing with a model that has mteb's `SearchProtocol`.

        Returns:
            `AIR_BENCH_RESULT` → the data set, and for each split its file, the number of queries
            and the scores, which test splits have none of.

        Raises:
            AssetError: the hub does not give the data set.
            DataError: the data set is not laid out as it should be.
            ArtifactError: the results there are of another model or revision, or the model's
                answers are incomplete or no numbers.
        """
        results = open_results(
            self.folder, self.dataset.version, model.mteb_model_meta, self.retriever
        )
        missing = self._missing(results)
        if missing:
            self._make(model, results, missing)
        return {AIR_BENCH_RESULT: self._outcome(results)}

    def _missing(self, results: AirBenchResults) -> list[Split]:
        instruction = query_instruction(self.dataset)
        return [
            split
            for split in self.dataset.splits
            if results.finished(self.dataset, split, instruction) is None
        ]

    def _make(self, model: Any, results: AirBenchResults, splits: Sequence[Split]) -> None:
        data = load_data(self.dataset, self.cache)
        labels = load_labels(self.dataset, self.cache) if "dev" in splits else {}
        if stray := sorted(set(labels) - set(data.queries["dev"]["id"])) if labels else []:
            raise DataError(
                f"{self.dataset.labels_repository!r} labels {len(stray)} queries that "
                f"{self.dataset.repository!r} does not have, such as {stray[:5]}"
            )
        found = self._search(model, data, splits)
        named = {name for of_split in found.values() for hits in of_split.values() for name in hits}
        if unknown := unknown_ids(data.corpus, named):
            raise ArtifactError(
                f"{self.name}: the model finds documents that the corpus does not have, such as "
                f"{unknown[:5]}"
            )
        for split in splits:
            results.save(
                self.dataset,
                split,
                found[split],
                instruction=query_instruction(self.dataset),
                dataset_revision=data.revision,
                num_documents=len(data.corpus),
                scores=retrieval_scores(labels, found[split]) if split == "dev" else {},
            )

    def _search(
        self, model: Any, data: AirBenchData, splits: Sequence[Split]
    ) -> dict[Split, dict[str, dict[str, float]]]:
        """Scores of the best documents by split, query and document.

        The corpus is indexed for one search, because models may let go of it after that. Queries
        are told apart by their splits, since nothing says that two splits share no id.
        """
        options: dict[str, Any] = {
            "task_metadata": task_metadata(self.dataset, data.revision),
            "hf_split": splits[-1],
            "hf_subset": "default",
            "encode_kwargs": {"batch_size": self.batch_size, "show_progress_bar": False},
            "num_proc": None,
        }
        asked = {
            (split, str(query)): str(text)
            for split in splits
            for query, text in zip(*_columns(data.queries[split]), strict=True)
        }
        names = {f"{split}/{query}": (split, query) for split, query in asked}
        queries = Dataset.from_dict({"id": list(names), "text": list(asked.values())})
        model.index(data.corpus, **options)
        best = checked(model.search(queries, top_k=DEPTH, **options), names, self.name)
        found: dict[Split, dict[str, dict[str, float]]] = {split: {} for split in splits}
        for name, (split, query) in names.items():
            found[split][query] = best.pop(name)
        return found

    def _outcome(self, results: AirBenchResults) -> dict[str, Any]:
        dataset = self.dataset
        told: dict[str, Any] = {}
        for split in dataset.splits:
            record = results.record(dataset, split)
            assert record is not None, f"{self.name}: no record of {split}"
            told[split] = {
                "file": results.path(dataset, split),
                "num_queries": record.num_queries,
                "scores": dict(record.scores),
            }
        return {
            "version": dataset.version,
            "retriever": results.retriever,
            "dataset": dataset.label,
            "main_score": MAIN_SCORES[dataset.task],
            "splits": told,
        }


def _columns(queries: Dataset) -> tuple[list[str], list[str]]:
    return list(queries["id"]), list(queries["text"])


def air_bench_jobs(
    version: str,
    folder: str,
    *,
    retriever: str = "",
    tasks: Sequence[str] = (),
    domains: Sequence[str] = (),
    languages: Sequence[str] = (),
    splits: Sequence[str] = (),
    cache: str | None = None,
) -> list[AirBenchJob]:
    """A job for each data set of a version, or for those that are wanted.

    Args:
        folder: of all results of AIR-Bench.
        splits: `dev` (24.05 only) and `test`; none: all, as with the other choices.

    Raises:
        ConfigError: an unknown name, or nothing that is all of what is wanted; or what scores dev
            splits is not installed.
    """
    require_packages(f"the benchmark {version}", "air-bench", "pytrec_eval")
    chosen = air_bench_datasets(
        version, tasks=tasks, domains=domains, languages=languages, splits=splits
    )
    return [AirBenchJob(dataset, folder, retriever, cache) for dataset in chosen]
