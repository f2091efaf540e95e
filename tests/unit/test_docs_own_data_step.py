"""docs/own_data_step.md, installed as a package of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rayembed
from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe

PLATFORM = Path(rayembed.__file__).parents[1]
PAGE = (PLATFORM.parent / "docs" / "own_data_step.md").read_text()

SCRIPT = """
import io, pickle, sys
from rayembed.config.data_run import DataRun
from rayembed.config.override import override
from rayembed.recipes.data_recipes import get_data_recipe
run = override(get_data_recipe("pairs"), [
    "data.datasets.pairs.source.path=pairs.jsonl",
    "data.datasets.pairs.held_out=null",
    "data.datasets.pairs.few_words.most=2",
])
assert not {"torch", "ray", "pyarrow"} & set(sys.modules)
from rayembed.config.data_steps import data_steps
shown = ("few_words", "mining", "clusters")
print(*(step.kind for step in data_steps() if step.kind in shown))
from pathlib import Path
Path("run.yaml").write_text(run.to_yaml())
assert pickle.loads(pickle.dumps(DataRun.read("run.yaml"))) == run
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.prepare import prepare_datasets
from rayembed.pipeline.data.tables import print_data_run
out = io.StringIO()
print_data_run(run, ["pairs"], out)
assert "few words" in out.getvalue()
for until in ("records", None, None):
    folders = prepare_datasets(run, PipelineContext("out", 0), until=until)["pairs"]
    print(*((one.manifest["kind"], one.reused) for one in folders))
print(folders[-1].manifest["dropped"])
other = override(run, ["data.datasets.pairs.few_words.most=3"])
(records,) = prepare_datasets(other, PipelineContext("out", 0), until="records")["pairs"]
print("records are", "the same" if records.reused else "others")
print(*sorted(record.query for part in folders[-1].parts for record in read_records(part.path)))
"""


def test_without_the_package_the_step_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="few_words"):
        override(get_recipe("biencoder"), ["data.datasets.pairs.few_words.most=2"])


def test_the_pages_step_is_a_setting_of_data_sets_and_makes_records(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n# my_package/(\S+)\n(.*?)^```", PAGE, re.M | re.S)
    (points,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    package, info = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
    for folder in (package, info):
        folder.mkdir()
    (package / "__init__.py").write_text("")
    (package / code[0]).write_text(code[1])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    points = points.replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    (info / "entry_points.txt").write_text(points)
    rows = [{"query": f"{'word ' * n}{n}", "positive": f"text {n}"} for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, PLATFORM)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "few_words mining clusters",
        "('records', False)",
        "('records', True) ('few_words', False)",
        "('records', True) ('few_words', True)",
        "{'too many words': 2}",
        "records are the same",
        "0 word 1",
    ]
