"""A comment, the text of an error and a further architecture give no stored data another name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from further_data_jobs import write_inputs
from made_up_articles import write_articles
from tiny_folders import save_biencoder

import rayembed

PLATFORM = Path(rayembed.__file__).parents[1]
SUPPORT = Path(__file__).parents[1] / "support"

NAMES = """
import json, sys
from pathlib import Path
import rayembed
model, inputs, articles, storage = map(Path, sys.argv[1:])
from further_data_jobs import dataset, stage
from made_up_articles import run_over
from run_scoring import tasks_of
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.model import ARCHITECTURES
from rayembed.errors import ConfigError
from rayembed.evaluation.run_scores import bm25_revision, decided, make_spec, run_prompts
for name in ("searched", "brought", "graded"):
    stage(name, dataset(name), inputs, storage)
made = [*storage.glob("data/*/*"), *storage.glob("plans/*")]
folders = {str(path.relative_to(storage)) for path in made if path.suffix != ".lock"}
spec = make_spec(ModelUnderTest(reference=str(model)))
run = run_over(articles)
names = [spec.meta.revision, spec.fingerprint, *sorted(folders), bm25_revision(), run.fingerprint]
names.append(repr(decided(tasks_of(run), run_prompts(run))))
print(json.dumps([rayembed.__file__, list(ARCHITECTURES.classes()), names]))
"""


@pytest.fixture(scope="module")
def names_of(tmp_path_factory):
    """Gives the names of the data that a tree makes of the same inputs."""
    root = tmp_path_factory.mktemp("inputs")
    model = save_biencoder(root / "model")
    (root / "data").mkdir()
    write_inputs(root / "data")
    articles = write_articles(root / "articles.json")

    def names(platform, storage):
        path = os.pathsep.join([str(platform), str(SUPPORT)])
        command = [sys.executable, "-c", NAMES, str(model), str(root / "data"), str(articles)]
        done = subprocess.run(
            [*command, str(storage)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        file, architectures, found = json.loads(done.stdout.splitlines()[-1])
        assert file.startswith(str(platform))
        return architectures, found

    return names


@pytest.fixture(scope="module")
def here(names_of, tmp_path_factory):
    """Architectures and names of this tree."""
    return names_of(PLATFORM, tmp_path_factory.mktemp("here"))


def edited(root):
    """A copy of the code with comments, other texts of errors and a further architecture."""
    platform = root / "platform"
    shutil.copytree(PLATFORM, platform, ignore=shutil.ignore_patterns("__pycache__"))
    changed = 0
    for path in (platform / "rayembed").rglob("*.py"):
        text = path.read_text()
        other = text.replace("must be ", "has to be ").replace("cannot be ", "can not be ")
        changed += other != text
        path.write_text(f"{other}\n# A comment.\n")
    assert changed > 30
    models = platform / "rayembed" / "models"
    shutil.copytree(models / "biencoder", models / "further")
    for path in (models / "further").glob("*.py"):
        path.write_text(path.read_text().replace("biencoder", "further"))
    table = platform / "rayembed" / "config" / "model.py"
    line = '        "rayembed.models.biencoder.config:BiEncoderConfig",\n'
    assert line in table.read_text()
    added = line + line.replace("biencoder", "further")
    table.write_text(table.read_text().replace(line, added))
    return platform


def test_edits_that_compute_the_same_keep_all_names(names_of, here, tmp_path):
    known, names = here
    more, found = names_of(edited(tmp_path), tmp_path / "there")
    assert set(more) == {*known, "further"}
    assert found == names
    for kind in ("data/vectors/", "data/mined/", "data/records/", "plans/"):
        assert any(name.startswith(kind) for name in names), kind


def test_a_raised_number_gives_other_names(names_of, here, tmp_path):
    """The control: what the names are made of is seen."""
    platform = tmp_path / "platform"
    shutil.copytree(PLATFORM, platform, ignore=shutil.ignore_patterns("__pycache__"))
    versions = platform / "rayembed" / "models" / "versions.py"
    raised = versions.read_text().replace("\nVECTORS = ", "\nVECTORS = 1000 + ")
    versions.write_text(raised)
    names, others = here[1], names_of(platform, tmp_path / "there")[1]
    assert len({*names} - {*others}) > 4
    assert any(name.startswith("data/records/") for name in {*names} & {*others})
