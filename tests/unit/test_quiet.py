"""Lines of libraries that say nothing are left out of a log; all others come through."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rayembed.display.quiet import (
    _HARMLESS,
    quiet,
    set_unset,
    terminal_stderr,
    without,
    without_harmless,
)


@pytest.fixture
def hushed():
    """`quiet` was called twice, as in a notebook; undone afterwards."""
    loggers = [logging.getLogger(name) for name in {name for name, _ in _HARMLESS} | {"mlflow"}]
    before = [(logger, list(logger.filters), logger.level) for logger in loggers]
    with warnings.catch_warnings():
        quiet()
        quiet()
        yield
    for logger, filters, level in before:
        logger.filters[:] = filters
        logger.setLevel(level)


@pytest.mark.parametrize(("name", "beginning"), _HARMLESS)
def test_a_harmless_line_is_left_out_and_another_one_of_its_logger_comes_through(
    hushed, caplog, name, beginning
):
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)  # DeepSpeed's does not hand on
    try:
        logger.warning("%s and so on", beginning)
        assert caplog.messages == []
        logger.warning("the loss is not finite")
    finally:
        logger.removeHandler(caplog.handler)
    assert set(caplog.messages) == {"the loss is not finite"}
    assert len(logger.filters) == 1


def test_a_renamed_function_of_torch_is_no_matter_and_other_warnings_are_shown(hushed):
    renamed = "`torch.distributed.all_gather` is deprecated. Use b"
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn(renamed, FutureWarning, 2)
        assert seen == []
        warnings.warn(renamed, UserWarning, 2)
        warnings.warn("`torch.load` is deprecated", FutureWarning, 2)
    assert [warning.category for warning in seen] == [UserWarning, FutureWarning]


def test_a_compiler_that_a_library_silences_is_silent_in_a_notebook_too(monkeypatch, capfd):
    def compile_silenced():
        """As DeepSpeed looks for libraries."""
        kept = os.dup(sys.stderr.fileno())
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
            subprocess.run(["sh", "-c", "echo no such library >&2"], check=True)
        os.dup2(kept, sys.stderr.fileno())
        os.close(kept)

    with os.fdopen(os.dup(2), "w") as notebooks:
        monkeypatch.setattr(sys, "stderr", notebooks)
        compile_silenced()
        assert capfd.readouterr().err == "no such library\n"
        with terminal_stderr():
            compile_silenced()
        assert capfd.readouterr().err == ""
        assert sys.stderr is notebooks


def test_lines_of_workers_stay_but_for_rays_own_actor():
    watcher = "core_worker.cc:2465: Actor with class name: 'PreemptionWatcher' and ID: 'e3' has"
    ours = "core_worker.cc:2465: Actor with class name: 'MetricsSink' and ID: 'e3' has"
    assert without_harmless([watcher, ours, "", "killed: out of memory"]) == [
        ours,
        "",
        "killed: out of memory",
    ]


def test_a_variable_that_is_set_stays(monkeypatch):
    monkeypatch.setenv("RAYEMBED_A", "mine")
    monkeypatch.delenv("RAYEMBED_B", raising=False)
    assert set_unset({"RAYEMBED_A": "1", "RAYEMBED_B": "2"}) == {"RAYEMBED_B": "2"}
    monkeypatch.delenv("RAYEMBED_B")


def test_rays_workers_begin_with_it_at_once():
    """It runs in every worker before its first task."""
    code = (
        "import sys, rayembed.display.quiet as q; q.quiet(); "
        "print([n for n in ('torch', 'ray', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "takes_jax"), [("rayembed.search.bm25_library", False), ("bm25s", True)]
)
def test_who_counts_words_does_not_import_jax(tmp_path, module, takes_jax):
    """The control is bm25s by itself."""
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "lax.py").write_text(
        "import numpy\ntop_k = lambda scores, k: numpy.sort(scores)[:k]\n"
    )
    code = f"import sys, {module}; print('jax.lax' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(takes_jax)] * 2


def test_a_package_that_is_imported_stays_visible_to_what_would_take_it(monkeypatch):
    with without("json"):
        import json

        assert json.loads("1") == 1
    monkeypatch.delitem(sys.modules, "json")
    with without("json"), pytest.raises(ImportError):
        import json
    assert "json" not in sys.modules


def test_a_model_is_loaded_without_a_progress_bar(tmp_path, monkeypatch, capfd):
    """Bars of other code of the process stay as they are."""
    from tiny_models import save_encoder
    from transformers import AutoModel
    from transformers.utils import logging as transformers_logging

    from rayembed.models.loading.load import load_model

    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    try:
        load_model(save_encoder(tmp_path / "model"))
        assert "Loading weights" not in capfd.readouterr().err
        assert transformers_logging.is_progress_bar_enabled()
        AutoModel.from_pretrained(tmp_path / "model")
        assert "Loading weights" in capfd.readouterr().err, "the control"
    finally:
        if not was_shown:
            transformers_logging.disable_progress_bar()
