"""Run a notebook as a reader does: `python tests/support/notebooks.py examples/own_pairs.ipynb`
writes its outputs into it, without the paths of this machine.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat

PLATFORM = Path(__file__).resolve().parents[2] / "platform"


def executed(path, folder, *, seconds=3600):
    """The notebook at `path` with the outputs of a run in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    from nbclient import NotebookClient

    notebook = nbformat.read(path, 4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=seconds,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    path_of_modules = os.pathsep.join([str(PLATFORM), os.environ.get("PYTHONPATH", "")])
    client.execute(env={**os.environ, "PYTHONPATH": path_of_modules.rstrip(os.pathsep)})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            _take_paths_away(output, folder)
    del notebook.metadata["language_info"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def _take_paths_away(output, folder):
    """Write paths below the folder as a reader would: from the notebook's own folder."""
    for kept in (output, output.get("data", {})):
        for name, text in kept.items():
            if isinstance(text, str) and name != "image/png":
                kept[name] = text.replace(f"{folder}/", "").replace(str(folder), ".")


if __name__ == "__main__":
    for given in map(Path, sys.argv[1:]):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            nbformat.write(executed(given, Path(place).resolve()), given)
        sys.stdout.write(f"{given.name}: {(time.monotonic() - began) / 60:.1f} minutes\n")
