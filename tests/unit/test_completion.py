"""`rayembed completion SHELL`: a shell completes jobs, options and recipes."""

import contextlib
import io
import subprocess

from rayembed.recipes.catalogue import recipe_names
from rayembed_extras.completion.completion import print_completion

COMPLETES = """
source completion.sh
completed() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _shtab_rayembed 2> /dev/null
  echo "${COMPREPLY[@]}"
}
completed rayembed ev
completed rayembed train --pa
completed rayembed train --recipe causal2vec-q
"""


def test_bash_completes_jobs_options_and_recipes(tmp_path):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert print_completion(["bash"]) == 0
    (tmp_path / "completion.sh").write_text(said.getvalue())
    done = subprocess.run(
        ["bash", "-c", COMPLETES], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    jobs, options, recipes = (line.split() for line in done.stdout.splitlines())
    assert jobs == ["evaluate"]
    assert options == ["--pairs"]
    assert sorted(recipes) == [name for name in sorted(recipe_names()) if "causal2vec-q" in name]
    for shell in ("zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert print_completion([shell]) == 0
        assert "prepare" in said.getvalue()
