"""Script: converts entries of the catalogue and prints their records, a list an entry.

python convert_entries.py FOLDER ENTRY...
"""

import json
import sys

from rayembed.config.mining import CleaningConfig
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_table
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut
from rayembed.recipes.data_recipes import known_datasets


def main(folder: str, names: list[str]) -> None:
    """Print one line of JSON."""
    found = []
    for name in names:
        config = known_datasets()[name].config.model_copy(update={"cleaning": CleaningConfig()})
        made = make_records(PipelineContext(folder, seed=0), check_source(config, ""), HeldOut())
        found.append([row for part in made.parts for row in read_table(part.path).to_pylist()])
    print(json.dumps(found))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
