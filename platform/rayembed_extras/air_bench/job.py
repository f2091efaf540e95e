"""Search one AIR-Bench data set: a picklable part of an evaluation.

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
from rayembed_extras.air_bench.task import query_instruction, task_metadata

AIR_BENCH_RESULT = "air_bench_result"
"""Key of the outcome of `AirBenchJob.run`."""

_BATCH = 1024
"""Number of texts passed to models that do not choose their own batch size."""


@dataclass(frozen=True)
class AirBenchJob:
    """Writes the result files of a data set, and scores its dev split if it has one."""

    dataset: AirBenchDataset
    """Data set, with the requested splits."""
    folder: str
    """Folder of all results of AIR-Bench (`results.py`), local or in object storage."""
    cache: str | None = None
    """Cache of the data sets; None: the default of `datasets`."""

    @property
    def name(self) -> str:
        """Name of the job and of mteb's task, such as `AIR-Bench_24.05_qa_arxiv_en_default`."""
        return f"{self.dataset.version}_{self.dataset.label}"

    @property
    def num_texts(self) -> int:
        """Number of documents and queries that the benchmark's authors published."""
        return self.dataset.num_documents + sum(self.dataset.num_queries.values())

    def finished(self, meta: ModelMeta) -> bool:
        """Whether all splits have results of this model, so that `run` does not embed
        anything.

        Raises:
            ArtifactError: the results there are of another model or revision.
        """
        return not self._missing(open_results(self.folder, self.dataset.version, meta))

    def run(self, model: Any) -> dict[str, Any]:
        """Search the splits that have no result yet; the model implements mteb's
        `SearchProtocol`.

        Returns:
            `AIR_BENCH_RESULT` → the model's name in the results, and the scores of each split, of
            which test splits have none.

        Raises:
            AssetError: the hub does not give the data set.
            DataError: the data set is not laid out as it should be.
            ArtifactError: the results there are of another model or revision, or the model's
                answers are incomplete or no numbers.
        """
        results = open_results(self.folder, self.dataset.version, model.mteb_model_meta)
        missing = self._missing(results)
        if missing:
            self._make(model, results, missing)
        records = {split: results.record(self.dataset, split) for split in self.dataset.splits}
        scores = {split: dict(record.scores) for split, record in records.items() if record}
        return {AIR_BENCH_RESULT: {"retriever": results.retriever, "scores": scores}}

    def _missing(self, results: AirBenchResults) -> list[Split]:
        instruction = query_instruction(self.dataset)
        return [
            split
            for split in self.dataset.splits
            if not results.finished(self.dataset, split, instruction)
        ]

    def _make(self, model: Any, results: AirBenchResults, splits: Sequence[Split]) -> None:
        data = load_data(self.dataset, self.cache)
        labels = load_labels(self.dataset, self.cache) if "dev" in splits else {}
        if stray := sorted(set(labels) - set(data.queries["dev"]["id"])) if labels else []:
            raise DataError(
                f"the labels in {self.dataset.labels_repository!r} are for {len(stray)} queries "
                f"that {self.dataset.repository!r} does not have, such as {stray[:5]}"
            )
        found = self._search(model, data, splits)
        named = {name for of_split in found.values() for hits in of_split.values() for name in hits}
        if unknown := unknown_ids(data.corpus, named):
            raise ArtifactError(
                f"{self.name}: the model returned documents that are not in the corpus, such as "
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
        """Search the corpus; return split → query → best documents with their scores.

        The corpus is indexed for one search, because models may let go of it after that. Queries
        are distinguished by their splits, because two splits may share ids.
        """
        options: dict[str, Any] = {
            "task_metadata": task_metadata(self.dataset, data.revision),
            "hf_split": splits[-1],
            "hf_subset": "default",
            "encode_kwargs": {"batch_size": _BATCH, "show_progress_bar": False},
            "num_proc": None,
        }
        queries = Dataset.from_list(
            [
                {"id": f"{split}/{row['id']}", "text": row["text"]}
                for split in splits
                for row in data.queries[split]
            ]
        )
        model.index(data.corpus, **options)
        found = model.search(queries, top_k=DEPTH, **options)
        best = checked(found, list(queries["id"]), self.name)
        return {
            split: {name: best[f"{split}/{name}"] for name in data.queries[split]["id"]}
            for split in splits
        }


def air_bench_jobs(
    version: str, folder: str, languages: Sequence[str] = (), cache: str | None = None
) -> list[AirBenchJob]:
    """Create a job for each data set of a version in the requested languages; no languages: all.

    Args:
        folder: of all results of AIR-Bench.

    Raises:
        ConfigError: an unknown language; or what scores dev splits is not installed.
    """
    require_packages(f"the benchmark {version}", "air-bench", "pytrec_eval")
    chosen = air_bench_datasets(version, languages=languages)
    return [AirBenchJob(dataset, folder, cache) for dataset in chosen]
