"""Changed queries of two models whose results lie in a folder."""

import json

import pytest
from beir_set import write_beir
from scored_sets import own_task, scored

from rayembed.jobs.table import JOBS
from rayembed.results.files import CONDITIONS_FILE
from rayembed_extras.query_changes.cut_texts import FILE

DOCUMENTS = {f"d{n}": f"the answer number {n}" for n in range(12)}
QUERIES = {f"q{n}": f"which is number {n}" for n in range(4)}
JUDGED = {f"q{n}": {f"d{n}": 1} for n in range(4)}
OTHERS = [f"d{n}" for n in range(4, 12)]


@pytest.fixture
def folder(tmp_path):
    """Results of two models on an own set, the second worse on two queries and better on one."""
    task = own_task(write_beir(tmp_path / "set", DOCUMENTS, QUERIES, JUDGED))
    first = {f"q{n}": [f"d{n}", *OTHERS] for n in range(4)} | {"q3": [*OTHERS, "d3"]}
    later = {f"q{n}": [*OTHERS, f"d{n}"] for n in range(2)} | {
        f"q{n}": [f"d{n}", *OTHERS] for n in (2, 3)
    }
    for name, rankings in (("base", first), ("trained", later)):
        judged = scored(tmp_path / "results", name, task, rankings)
        row = {"task": "planted", "type": "Retrieval", "metric": "ndcg_at_10"}
        row |= {"dataset": "own/planted", "side": "query", "role": "query", "prompt": ""}
        record = json.dumps({"conditions": {}, "prompts": [row]})
        (judged.local / CONDITIONS_FILE).write_text(record)
        if name == "trained":
            cut = {"queries": {"q0": 30}, "query_limit": 16, "documents": {"d9": 40}}
            content = {"planted": {"test/default": cut}}
            (judged.local / FILE).write_text(json.dumps(content))
    return tmp_path


def compared(folder, *arguments):
    output = folder / "out"
    code = JOBS.get("compare")(
        ["--results", str(folder / "results"), "--output", str(output), *arguments]
    )
    return code, output


def test_two_models_are_compared_on_the_own_sets_that_are_named(folder, capsys):
    code, output = compared(folder, "--baseline", "base", "--own-set", f"planted={folder / 'set'}")
    assert code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "planted: 2 of 4 queries are worse with trained than with base, 1 better" in printed
    page = (output / "query_changes.html").read_text()
    assert "it reads 16 of 30 tokens of the query" in page
    assert "d9" not in page.partition("<ul class")[2].partition("</ul>")[0]
    assert page.count('class="query"') == 3
    assert "Which texts the first model cuts is not known." in page


def test_without_the_folder_of_a_set_the_option_is_named(folder, capsys):
    code, output = compared(folder)
    assert code == 0
    assert "--own-set planted=FOLDER" in capsys.readouterr().out
    assert not (output / "query_changes.html").exists()


def test_another_set_than_was_scored_is_refused(folder, capsys):
    other = write_beir(
        folder / "other", DOCUMENTS, {**QUERIES, "q9": "new"}, {**JUDGED, "q9": {"d9": 1}}
    )
    code, output = compared(folder, "--own-set", f"planted={other}")
    assert code == 0, "the comparison itself needs no texts"
    assert "has other queries or documents than the stored results" in capsys.readouterr().out
    assert not (output / "query_changes.html").exists()


def test_each_of_several_models_has_a_page_of_its_own(folder):
    task = own_task(folder / "set")
    judged = scored(folder / "results", "third/model", task, dict.fromkeys(QUERIES, OTHERS))
    base = next((folder / "results").glob(f"results/*base/*/{CONDITIONS_FILE}"))
    (judged.local / CONDITIONS_FILE).write_bytes(base.read_bytes())
    _, output = compared(folder, "--baseline", "base", "--own-set", f"planted={folder / 'set'}")
    names = sorted(path.name for path in output.glob("*.html"))
    assert names == ["query_changes-model.html", "query_changes-trained.html"]
