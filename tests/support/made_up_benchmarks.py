"""Made-up rows of GLUE and XTREME-R, as Parquet files in the layout of the hub."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Columns = dict[str, list[Any]]

GLUE = "nyu-mll/glue"


def parquet(columns: Columns) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def pairs(first: str, second: str, num_rows: int, num_labels: int, shift: int = 0) -> Columns:
    """Pairs whose label stands in the second text as a word."""
    words = ["cats", "dogs", "wonders"]
    labels = [(n + shift) % num_labels for n in range(num_rows)]
    return {
        first: [f"where do they live {n % 3}" for n in range(num_rows)],
        second: [f"{words[label]} live in Paris" for label in labels],
        "label": labels,
        "idx": list(range(num_rows)),
    }


def single(num_rows: int) -> Columns:
    labels = [n % 2 for n in range(num_rows)]
    return {
        "sentence": [("the quick fox", "are cats larger")[label] for label in labels],
        "label": labels,
        "idx": list(range(num_rows)),
    }


def glue_files(num_rows: int = 12) -> dict[str, bytes]:
    """Some of GLUE's tasks; training splits in two files, which the hub makes of long ones."""
    similar = pairs("sentence1", "sentence2", num_rows, 2)
    similar["label"] = [5.0 * n / num_rows for n in range(num_rows)]
    nli = ("premise", "hypothesis")
    files = {
        "cola/train/0000.parquet": single(num_rows),
        "cola/train/0001.parquet": single(2),
        "cola/validation/0000.parquet": single(4),
        "stsb/train/0000.parquet": similar,
        "stsb/validation/0000.parquet": similar,
        "mnli/train/0000.parquet": pairs(*nli, num_rows, 3),
        "mnli/validation_matched/0000.parquet": pairs(*nli, 6, 3),
        "mnli/validation_mismatched/0000.parquet": pairs(*nli, 5, 3, 1),
        "rte/train/0000.parquet": pairs("sentence1", "sentence2", num_rows, 2),
        "rte/validation/0000.parquet": pairs("sentence1", "sentence2", 4, 2),
    }
    return {path: parquet(columns) for path, columns in files.items()}


def answers(*found: tuple[str, int]) -> Mapping[str, list[Any]]:
    return {"text": [text for text, _ in found], "answer_start": [start for _, start in found]}


CONTEXT = "Paris is the capital of France and the fox lives over there"


def questions(num_rows: int, prefix: str = "q") -> Columns:
    starts = [CONTEXT.index(word) for word in ("Paris", "France", "fox")]
    found = [("Paris", starts[0]), ("France", starts[1]), ("fox", starts[2])]
    return {
        "id": [f"{prefix}-{n}" for n in range(num_rows)],
        "title": ["t"] * num_rows,
        "context": [CONTEXT] * num_rows,
        "question": [f"where is {n % 3}" for n in range(num_rows)],
        "answers": [answers(found[n % 3]) for n in range(num_rows)],
    }


def tagged(column: str, tags: list[list[Any]]) -> Columns:
    return {"tokens": [["Paris", "lives", "there"] for _ in tags], column: tags}


def xtreme_repositories() -> dict[str, dict[str, bytes]]:
    """The repositories of all finetunings, with a language or two."""
    nli = ("premise", "hypothesis")
    ner = [[1, 0, 0], [3, 4, 0]]
    pos = [["PROPN", "VERB", "_"], ["X", "X", "ADV"]]
    choices = {"question": ["cause", "effect"], "label": [0, 1]}
    both = {"choice1": ["the fox", "cats"], "choice2": ["dogs", "Paris"]}
    copa = {"premise": ["where do they live", "are cats larger"], **choices, **both}
    three = {f"answer{sign}": [f"fox {sign}", f"dogs {sign}"] for sign in "ABC"}
    siqa = {"context": copa["premise"], "question": ["why", "who"], **three, "label": ["3", "1"]}
    bitext = {"sentence1": ["eins", "zwei"], "sentence2": ["one", "two"], "lang": ["d", "d"]}
    mixed = questions(2, "english")
    for name, values in questions(3, "korean").items():
        mixed[name] = mixed[name] + values
    return {
        repository: {path: parquet(columns) for path, columns in files.items()}
        for repository, files in {
            "facebook/xnli": {"de/test/0000.parquet": pairs(*nli, 6, 3)},
            "unimelb-nlp/wikiann": {
                "en/train/0000.parquet": tagged("ner_tags", ner),
                "de/test/0000.parquet": tagged("ner_tags", ner),
            },
            "izhx/xtreme-r-udpos": {
                "en/train.parquet": tagged("pos_tags", pos),
                "de/test.parquet": tagged("pos_tags", pos),
            },
            "allenai/social_i_qa": {
                "default/train/0000.parquet": siqa,
                "default/validation/0000.parquet": siqa,
            },
            "aps/super_glue": {"copa/train/0000.parquet": copa},
            "cambridgeltl/xcopa": {"et/test/0000.parquet": copa},
            "google-research-datasets/xquad_r": {"de/validation/0000.parquet": questions(3)},
            "rajpurkar/squad": {"plain_text/train/0000.parquet": questions(6)},
            "google/xquad": {"xquad.de/validation/0000.parquet": questions(3)},
            "google-research-datasets/tydiqa": {
                "secondary_task/train/0000.parquet": mixed,
                "secondary_task/validation/0000.parquet": mixed,
            },
            "mteb/tatoeba-bitext-mining": {"deu-eng/test/0000.parquet": bitext},
        }.items()
    }


def write_copies(folder: Path, repositories: Mapping[str, Mapping[str, bytes]]) -> Path:
    """A folder of copies for `data_root`."""
    for repository, files in repositories.items():
        for path, content in files.items():
            place = folder / repository / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    return folder
