"""Turn the user's own evaluation sets into mteb tasks.

The data are read and checked once (`own_data`, `own_tables`), kept in the cache of assets, and
mapped from there: a corpus never stands in memory whole. A process that first opens a set reads its
files once and compares their digests, and makes them anew where one is another: Arrow takes a
flipped bit for another text, or ends the process. The revision of a task's data set is a
fingerprint of its content and of the instruction, so that results of other data or another
instruction never pass for these.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTask
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.clustering import AbsTaskClustering
from mteb.abstasks.pair_classification import AbsTaskPairClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.languages import check_language_code

from rayembed.assets.arrow_files import read_stream
from rayembed.assets.cache import cache_folder, filled
from rayembed.assets.storage import join
from rayembed.config.document import fingerprint
from rayembed.config.own_sets import (
    ClassificationSet,
    ClusteringSet,
    OwnSet,
    PairClassificationSet,
    RetrievalSet,
    STSSet,
)
from rayembed.config.run_evaluation import SAMPLE
from rayembed.data.sources.files import list_pieces
from rayembed.errors import ConfigError
from rayembed.evaluation.benchmarks import task_names
from rayembed.evaluation.model_spec import SCORES
from rayembed.evaluation.own_data import (
    CORPUS,
    JUDGEMENTS,
    QUERIES,
    About,
    find_files,
    read_about,
    write_set,
)
from rayembed.evaluation.own_tables import (
    AboutTables,
    Form,
    OwnTable,
    read_about_tables,
    table_file,
    write_tables,
)

MEASURES: Mapping[str, tuple[str, str]] = {
    "retrieval": ("Retrieval", "ndcg_at_10"),
    "classification": ("Classification", "accuracy"),
    "clustering": ("Clustering", "v_measure"),
    "pair_classification": ("PairClassification", "max_ap"),
    "sts": ("STS", "cosine_spearman"),
}
"""Kind of a set → its type of task as mteb has it, and its main score."""

_OF_THE_DATA = {
    *("name", "kind", "path", "train", "split", "instruction", "language", "languages"),
}
"""Settings that the content of a set and its instruction stand for."""

_FORMS: Mapping[type, Form] = {
    ClassificationSet: "classes",
    ClusteringSet: "classes",
    PairClassificationSet: "pairs",
    STSSet: "grades",
}


@dataclass(frozen=True)
class OwnTask:
    """Picklable factory of the mteb task over a user's own set, used like `MtebTask`."""

    settings: OwnSet

    @property
    def name(self) -> str:
        """The task's name in tables and result files; mteb has no task of this name."""
        return self.settings.name

    def load(self) -> Any:
        """Return a fresh task; the first call on this machine reads the data.

        Raises:
            ConfigError: a name that is a task of mteb's, or an unknown language.
            DataError: no such set, or rows that cannot be scored; all are counted.
        """
        self._check()
        task = _TASKS[type(self.settings)](self.settings)
        remember_prompt(task.metadata, task.abstask_prompt)
        return task

    @property
    def num_texts(self) -> int:
        """Maximum number of texts to embed; the first call reads the set's data, as in `load`."""
        if isinstance(self.settings, RetrievalSet):
            return sum(about.documents + about.queries for about in self.abouts.values())
        return tables_of(self.settings)[1].num_texts

    @property
    def size(self) -> tuple[int, str]:
        """Size of the set and its unit, documents or rows; the first call reads the data."""
        if isinstance(self.settings, RetrievalSet):
            return sum(about.documents for about in self.abouts.values()), "documents"
        return self.num_texts, "rows"

    @property
    def abouts(self) -> dict[str, About]:
        """Statistics of a retrieval set by language; the key is `default` for a set without
        languages.
        """
        assert isinstance(self.settings, RetrievalSet)
        return {
            code: read_about(folder) for code, folder in retrieval_folders(self.settings).items()
        }

    def _check(self) -> None:
        if self.name in task_names():
            raise ConfigError(
                f"the own set's name {self.name!r} is already the name of another task; choose "
                "another name"
            )
        for code in (self.settings.language, *getattr(self.settings, "languages", ())):
            try:
                check_language_code(code)
            except ValueError:
                raise ConfigError(
                    f"the own set {self.name!r} has the language {code!r}; expected a code of "
                    "ISO 639-3 and a script of ISO 15924, such as eng-Latn"
                ) from None


@lru_cache(maxsize=512)
def remember_prompt(metadata: TaskMetadata, prompt: str) -> type:
    """Register a task's prompt with mteb, for a task whose class this process has not
    imported.

    mteb looks among the classes of tasks that this process knows, and holds none of them itself.
    """
    return type(metadata.name, (AbsTask,), {"metadata": metadata, "abstask_prompt": prompt})


def retrieval_folders(own: RetrievalSet) -> dict[str, Path]:
    """Map each language of a retrieval set to the local folder of its prepared part; `default`
    without languages.
    """
    places = {code: join(own.path, code) for code in own.languages} or {"default": own.path}
    return {code: _written_set(path, own.split) for code, path in places.items()}


def tables_of(own: OwnSet) -> tuple[Path, AboutTables]:
    """Prepare the tables of an own set if needed; return their local folder and statistics."""
    splits = {"test": own.path}
    if isinstance(own, ClassificationSet):
        splits["train"] = own.train
    folder = _written_tables(tuple(splits.items()), _FORMS[type(own)])
    return folder, read_about_tables(folder)


def first_texts(own: OwnSet, count: int) -> list[str]:
    """Return the first `count` texts of an own set: the queries of a retrieval set, the first sides
    of pairs.
    """
    if isinstance(own, RetrievalSet):
        files = [(folder / QUERIES, "text") for folder in retrieval_folders(own).values()]
    else:
        column = "text" if _FORMS[type(own)] == "classes" else "sentence1"
        files = [(table_file(tables_of(own)[0], "test"), column)]
    return [text for file, column in files for text in Dataset.from_file(str(file))[:count][column]]


@lru_cache(maxsize=64)
def _written_set(path: str, split: str) -> Path:
    files = find_files(path, split)

    def fill(folder: Path) -> None:
        write_set(files, folder)

    return filled(cache_folder() / "own-sets" / f"{files.key}-{SCORES}", fill, checked=True)


@lru_cache(maxsize=64)
def _written_tables(splits: tuple[tuple[str, str], ...], form: Form) -> Path:
    tables = tuple(OwnTable(path, split, tuple(list_pieces(path))) for split, path in splits)
    key = fingerprint([form, [[t.split, [piece.key for piece in t.pieces]] for t in tables]])

    def fill(folder: Path) -> None:
        write_tables(tables, form, folder)

    return filled(cache_folder() / "own-sets" / f"{key}-{SCORES}", fill, checked=True)


class _Own:
    """Base class of mteb tasks over own sets, which load their data once and keep it."""

    dataset: Any
    data_loaded: bool

    def unload_data(self) -> None:
        """Free the loaded data; mteb's own method would also forget where the data is."""
        self.dataset = {}
        self.data_loaded = False


class _OwnTable(_Own):
    """Base class of mteb tasks whose data are rows of a table, such as classification and pairs."""

    metadata: TaskMetadata
    _folder: Path
    _splits: tuple[str, ...] = ("test",)

    def _read(self, own: OwnSet) -> AboutTables:
        self._folder, about = tables_of(own)
        self.metadata = _metadata(own, about.fingerprint)
        return about

    def load_data(self, num_proc: int | None = None, *, timer: Any = None, **_options: Any) -> None:
        """Memory-map the columns as the `dataset` that mteb reads."""
        del num_proc, timer
        files = {split: str(table_file(self._folder, split)) for split in self._splits}
        self.dataset = DatasetDict({name: Dataset.from_file(file) for name, file in files.items()})
        self.data_loaded = True


class OwnRetrieval(_Own, AbsTaskRetrieval):  # type: ignore[misc] # untyped
    """Retrieval task over an own set: its queries search its documents."""

    def __init__(self, own: RetrievalSet) -> None:
        self._folders = retrieval_folders(own)
        content = {code: read_about(at).fingerprint for code, at in self._folders.items()}
        told = content if own.languages else content["default"]
        self.metadata = _metadata(own, told, split=own.split)
        if own.languages:
            codes = {code: [code, own.language] for code in own.languages}
            self.metadata = self.metadata.model_copy(update={"eval_langs": codes})
        super().__init__()
        self.hf_subsets = list(self._folders)

    def load_data(self, num_proc: int | None = None, *, timer: Any = None, **_options: Any) -> None:
        """Memory-map documents and queries, and read the judgements, as the `dataset` that mteb
        reads.
        """
        del num_proc, timer
        (split,) = self.metadata.eval_splits
        self.dataset = {code: {split: _searched(at)} for code, at in self._folders.items()}
        self.data_loaded = True


def _searched(folder: Path) -> dict[str, Any]:
    with pa.memory_map(str(folder / JUDGEMENTS)) as file:
        columns = read_stream(file).to_pydict()
    relevant: dict[str, dict[str, int]] = {}
    for query, document, grade in zip(*columns.values(), strict=True):
        relevant.setdefault(query, {})[document] = grade
    return {
        "corpus": Dataset.from_file(str(folder / CORPUS)),
        "queries": Dataset.from_file(str(folder / QUERIES)),
        "relevant_docs": relevant,
        "top_ranked": None,
    }


class OwnClassification(_OwnTable, AbsTaskClassification):  # type: ignore[misc] # untyped
    """Classification task over an own set: a classifier learns from a few examples of each
    class.
    """

    _splits = ("train", "test")

    def __init__(self, own: ClassificationSet) -> None:
        self._read(own)
        self.samples_per_label, self.n_experiments = own.samples_per_label, own.experiments
        super().__init__()
        # mteb's is shared by all tasks of the process; of two at a time one would be wrong.
        self.evaluator_model = copy.deepcopy(AbsTaskClassification.evaluator_model)


class OwnClustering(_OwnTable, AbsTaskClustering):  # type: ignore[misc] # untyped
    """Clustering task over an own set: clusters of texts are compared with the given labels."""

    max_fraction_of_documents_to_embed = None
    input_column_name, label_column_name = "text", "label"

    def __init__(self, own: ClusteringSet) -> None:
        self._read(own)
        self.max_documents_per_cluster = own.documents_per_experiment
        self.n_clusters = own.experiments
        super().__init__()


class OwnPairClassification(_OwnTable, AbsTaskPairClassification):  # type: ignore[misc] # untyped
    """Pair classification task over an own set: decide whether two texts belong together."""

    label_column_name = "label"

    def __init__(self, own: PairClassificationSet) -> None:
        self._read(own)
        super().__init__()


class OwnSTS(_OwnTable, AbsTaskSTS):  # type: ignore[misc] # untyped
    """Similarity task over an own set: compare the similarity of texts with human scores."""

    def __init__(self, own: STSSet) -> None:
        about = self._read(own)
        self.min_score, self.max_score = about.lowest, about.highest
        super().__init__()


_TASKS: Mapping[type, Any] = {
    RetrievalSet: OwnRetrieval,
    ClassificationSet: OwnClassification,
    ClusteringSet: OwnClustering,
    PairClassificationSet: OwnPairClassification,
    STSSet: OwnSTS,
}


def _metadata(own: OwnSet, content: Any, *, split: str = "test") -> TaskMetadata:
    kind: Any
    kind, main_score = MEASURES[own.kind]
    told = {"content": content, "instruction": own.instruction or ""}
    if measured := own.model_dump(mode="json", exclude=_OF_THE_DATA):
        told["settings"] = measured
    prompt = own.instruction or None
    whose = "sample" if own.path.startswith(SAMPLE) else "own"
    return TaskMetadata(
        name=own.name,
        description=f"Own data for {own.kind.replace('_', ' ')}, split {split}.",
        type=kind,
        category="t2c" if kind in ("Classification", "Clustering") else "t2t",
        main_score=main_score,
        dataset={"path": f"{whose}/{own.name}", "revision": fingerprint(told)},
        prompt={"query": prompt} if prompt and kind == "Retrieval" else prompt,
        eval_splits=[split],
        eval_langs=[own.language],
    )
