"""Entries of the catalogue, converted from small repositories in the layouts of the real ones.

The repositories are served from loopback (`HF_ENDPOINT`). What cannot be checked here is that the
real ones still look as they are described.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dataset_hub import dataset_hub
from made_up_datasets import made_up_repositories, made_up_revisions

from rayembed.config.data import DatasetConfig
from rayembed.config.mining import CleaningConfig
from rayembed.config.sources import Source
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_table
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.earlier import RecordsSource
from rayembed.data.sources.tasks import HeldOut
from rayembed.errors import ConfigError
from rayembed.recipes.data_recipes import known_datasets
from rayembed_papers.sources.mteb import MtebSource


@pytest.fixture(scope="module")
def hub():
    """A hub with all made-up repositories, and `HF_ENDPOINT` for it."""
    served = dataset_hub(made_up_repositories(), revisions=made_up_revisions())
    with pytest.MonkeyPatch.context() as patch, served as running:
        patch.setenv("HF_ENDPOINT", running.address)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


def config_of(name: str) -> DatasetConfig:
    """As in the catalogue, but nothing of a benchmark is taken out, which would be fetched."""
    return known_datasets()[name].config.model_copy(update={"cleaning": CleaningConfig()})


def converted(config: DatasetConfig, folder: Path, root: str = "") -> DatasetArtifact:
    pipeline_context = PipelineContext(str(folder), seed=0, root=root)
    return make_records(pipeline_context, check_source(config, root), HeldOut())


def rows_of(prepared: DatasetArtifact) -> list[dict[str, Any]]:
    return [row for part in prepared.parts for row in read_table(part.path).to_pylist()]


def pairs_of(prepared: DatasetArtifact) -> dict[str, list[str]]:
    return {row["query"]: row["positives"] for row in rows_of(prepared)}


PAIRS = {
    # entry: query → positives, all that its repository gives
    "nvembed/paq-passages": {"who": ["she did"], "when": ["in May"]},
    "nvembed/natural-question": {"what is it": ["a fox"]},
    "nvembed/arguana": {"what do zoos do": ["Zoos They teach."]},
    "nvembed/stackexchange": {
        "Why is ice light?": ["It is an open lattice."],
        "Why is the sky blue?": ["Scattering."],
    },
    "nvembed/scifact": {"Cells divide.": ["Cells They divide.", "They do not."]},
    "nvembed/nli-similar": {"a fox runs": ["an animal moves"]},
    "nvembed/sts12": {
        "A fox runs.": ["A fox is running."],
        "A fox is running.": ["A fox runs."],
    },
    "nvembed/sts22": {
        "News of a fox.": ["A fox in the news."],
        "A fox in the news.": ["News of a fox."],
    },
    "nvembed/mr-tydi": {
        f"mr tydi question {n}": [f"mr tydi answer {n}", f"mr tydi other answer {n}"]
        for n in range(2)
    },
    "nomic/quora": {"How do foxes live?": ["How does a fox live?"]},
    "nomic/mc4-cy": {"Llwynogod": ["Maent yn byw\nyn y coed."]},
    "nomic/cc-news-cy": {"Newyddion": ["Gwelwyd llwynog."]},
    "nomic/finetuning-stack": {
        "Ice on water": ["It floats, but why?"],
        "Sky at noon": ["It is blue, but why?"],
    },
    "causal2vec/miracl": {
        f"{name} question {n}": [f"{name} answer {n}", f"{name} other answer {n}"]
        for name in ("miracl ru", "miracl sw")
        for n in range(2)
    },
    "cde/quora": {"How do foxes live?": ["How does a fox live?"]},
    "cde/bge-fever": {
        f"{name} question {n}": [f"{name} answer {n}", f"{name} other answer {n}"]
        for name in ("fever", "more fever")
        for n in range(2)
    },
}  # fmt: skip

CLASSES = {
    # entry: text → its class
    "nvembed/biorxiv-p2p-examples": {
        f"{kind} {n} On {kind} {n}.": kind
        for kind in ("ecology", "genetics", "zoology")
        for n in range(3)
    },
    "nvembed/biorxiv-s2s-labels": {
        f"{kind} {n}": kind for kind in ("ecology", "genetics", "zoology") for n in range(3)
    },
    "nvembed/twenty-newsgroups-examples": {
        f"{name} post {n}": name for name in ("rec.autos", "sci.space") for n in range(3)
    },
    "nvembed/reddit-labels": {
        f"{name} {n} Look at {name} {n}": name for name in ("foxes", "trains") for n in range(2)
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_come_out_of_the_real_layout(name, hub, tmp_path):
    config = config_of(name)
    prepared = converted(config, tmp_path)
    assert pairs_of(prepared) == PAIRS[name]
    for row in rows_of(prepared):
        assert row["dataset"] == config.name
        assert row["query_instruction"] == config.query_instruction
        assert row["document_instruction"] == config.document_instruction
        assert row["origin"], "rows say where in the repository they stand"


@pytest.mark.parametrize("name", CLASSES)
def test_classes_come_out_of_the_real_layout(name, hub, tmp_path):
    expected = CLASSES[name]
    rows = rows_of(converted(config_of(name), tmp_path))
    assert {row["query"]: row["label"] for row in rows} == expected
    for row in rows:
        (positive,) = row["positives"]
        others = [negative["text"] for negative in row["negatives"]]
        assert others
        if name.endswith("-labels"):
            assert positive == row["label"]
            assert set(others) == set(expected.values()) - {row["label"]}
        else:
            assert expected[positive] == row["label"]
            assert positive != row["query"]
            assert all(expected[text] != row["label"] for text in others)


def test_negatives_that_a_repository_brings(hub, tmp_path):
    given = converted(config_of("cde/bge-fever"), tmp_path)
    for row in rows_of(given):
        name, _, number = row["query"].partition(" question ")
        texts = [negative["text"] for negative in row["negatives"]]
        assert texts == [f"{name} wrong {number}", f"{name} {number} wrong"]
        assert {negative["rule"] for negative in row["negatives"]} == {"given"}
    # Those that are mined anew are read without them.
    mined = converted(config_of("nvembed/mr-tydi"), tmp_path)
    assert not any(row["negatives"] for row in rows_of(mined))
    contradicted = converted(config_of("nvembed/nli-entailed"), tmp_path)
    (row,) = rows_of(contradicted)
    assert [negative["text"] for negative in row["negatives"]] == ["nothing moves"]


def test_rows_that_are_left_out_are_counted(hub, tmp_path):
    alone = converted(config_of("nomic/mc4-cy"), tmp_path)
    assert alone.manifest["rows_in"] == 2
    assert sum(alone.manifest["rejected"].values()) == 1, "a page of one line"
    news = converted(config_of("nomic/cc-news-cy"), tmp_path)
    assert news.manifest["rejected"] == {"no query": 1}


def test_a_ratio_is_drawn_of_the_records(hub, tmp_path):
    config = config_of("causal2vec/miracl").model_copy(update={"sample_share": 0.5})
    prepared = converted(config, tmp_path)
    assert prepared.manifest["rows_out"] == 2  # of four
    assert set(pairs_of(prepared)) < set(PAIRS["causal2vec/miracl"])
    again = converted(config, tmp_path / "again")
    assert pairs_of(again) == pairs_of(prepared)


def test_only_files_of_the_entry_are_read_and_at_its_revision(hub, tmp_path):
    hub.asked.clear()
    converted(config_of("cde/bge-fever"), tmp_path)
    read = {path.split("/resolve/")[1].partition("/")[2] for path in hub.asked if "resolve" in path}
    assert read == {f"data/fever-0000{n}-of-00002.parquet" for n in range(2)}
    pinned = "78f5c99b534a52824ab26bd24edda592eaed4c7a"
    assert f"/api/datasets/cfli/bge-full-data/revision/{pinned}" in hub.asked


def test_a_layout_that_has_changed_is_named(hub, tmp_path):
    config = config_of("nvembed/paq-passages")
    source = config.source.model_copy(update={"positive": "passage"})
    with pytest.raises(ConfigError, match=r"source\.positive = 'passage'.*answer"):
        converted(config.model_copy(update={"source": source}), tmp_path)


def test_rows_of_the_users_own(hub, tmp_path):
    """What has no public home lies below `data.root`, where the entry's notes say so."""
    root = tmp_path / "root"
    for name, row in {
        "bioasq": {"query": "which gene", "positive": ["Genes. They mutate.", "More. On genes."]},
        "hover": {"query": "a claim", "positive": "an article"},
        "reddit-s2s": {"text": "look, a fox", "label": "foxes"},
        "stackexchange-clustering": {"text": "ice", "label": "chemistry"},
    }.items():
        other = {key: f"{value} too" for key, value in row.items()}
        (root / name).mkdir(parents=True)
        lines = [json.dumps(values) for values in (row, other)]
        (root / name / "train.jsonl").write_text("\n".join(lines))
    bioasq = converted(config_of("nvembed/bioasq"), tmp_path, str(root))
    assert pairs_of(bioasq)["which gene"] == ["Genes. They mutate.", "More. On genes."]
    assert pairs_of(converted(config_of("nvembed/hover"), tmp_path, str(root)))
    for name in ("nvembed/reddit-s2s-labels", "nvembed/stackexchange-clustering-labels"):
        rows = rows_of(converted(config_of(name), tmp_path, str(root)))
        assert all(row["positives"] == [row["label"]] for row in rows)


def test_records_that_the_synthesis_job_wrote(hub, tmp_path):
    """The entry `synthetic` takes the folder of another job with its instructions."""
    earlier = converted(config_of("cde/bge-fever"), tmp_path)
    source = RecordsSource(path=earlier.folder)
    config = config_of("nvembed/synthetic").model_copy(update={"source": source})
    taken = converted(config, tmp_path)
    assert pairs_of(taken) == PAIRS["cde/bge-fever"]
    assert {row["query_instruction"] for row in rows_of(taken)} == {"search_query: "}


def test_training_splits_of_mtebs_tasks_come_through_its_own_loader(hub, tmp_path):
    """In a process of its own: mteb's libraries read `HF_ENDPOINT` once, when they are imported."""
    names = ("nvembed/emotion-examples", "nvembed/amazon-reviews-labels")
    script = Path(__file__).parents[1] / "support" / "convert_entries.py"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out"), *names],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    emotion, reviews = json.loads(done.stdout.splitlines()[-1])
    assert {row["query"]: row["label"] for row in emotion} == {
        f"{name} {n}": name for name in ("joy", "fear", "anger") for n in range(2)
    }
    for row in emotion:
        (positive,) = row["positives"]
        assert positive.split()[0] == row["label"]
        assert positive != row["query"]
    stars = {f"en train review {n}": f"{n + 1} stars" if n else "1 star" for n in range(5)}
    assert {row["query"]: row["positives"] for row in reviews} == {
        text: [name] for text, name in stars.items()
    }
    for row in reviews:
        others = {negative["text"] for negative in row["negatives"]}
        assert others == set(stars.values()) - {row["label"]}


def family(source: Source) -> tuple[str, ...]:
    """What entries share whose layout is the same: the kind, the repository, the columns."""
    columns = source.model_dump(exclude={"path", "corpus", "queries", "label_form", "negatives"})
    path = str(getattr(source, "path", ""))
    repository = re.sub("@.*", "", path) if "://" in path else "own"
    if repository.startswith("hf://datasets/mteb/") and source.kind in ("beir", "classes"):
        repository = f"mteb in {source.kind}'s layout"  # alike in all of them, says the catalogue
    return (source.kind, repository, json.dumps(columns, sort_keys=True))


def test_every_layout_of_the_catalogue_is_converted_here():
    here = {*PAIRS, *CLASSES, "nvembed/bioasq", "nvembed/reddit-s2s-labels", "nvembed/synthetic"}
    covered = {family(known_datasets()[name].config.source) for name in here}
    for name, entry in known_datasets().items():
        source = entry.config.source
        if not isinstance(source, MtebSource):  # below, with mteb's own loader
            # STSBenchmark is laid out as STS12.
            alike = "nvembed/sts12" if name == "nvembed/stsbenchmark" else name
            assert family(known_datasets()[alike].config.source) in covered, name
