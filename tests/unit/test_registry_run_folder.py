import pytest

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError
from rayembed.registry.run_folder import RUN_FILE, claim_run_folder, refuse_other_run


def tiny_run(**changes):
    values = {
        "name": "tiny",
        "model": {"kind": "biencoder", "backbone": {"path": "hf://org/base@abc"}},
        "data": {"datasets": [{"name": "own", "source": {"kind": "pairs", "path": "p.jsonl"}}]},
        "stages": [
            {
                "name": "only",
                "datasets": {"own": 1.0},
                "batch": {"global_pairs": 8, "in_batch_negatives": True},
                "optimizer": {"learning_rate": 1e-4},
                "steps": 5,
            }
        ],
        **changes,
    }
    return parse(Run, values)


def test_new_folder_is_claimed_and_the_same_run_goes_on(tmp_path):
    run = tiny_run()
    assert claim_run_folder(tmp_path / "new" / "tiny", run) is False
    assert Run.read(tmp_path / "new" / "tiny" / RUN_FILE) == run
    moved = tiny_run(placement={"micro_batch_tokens": 64})
    assert claim_run_folder(tmp_path / "new" / "tiny", moved) is True
    assert Run.read(tmp_path / "new" / "tiny" / RUN_FILE) == moved


def test_other_run_of_that_name_is_refused_and_nothing_changes(tmp_path):
    run, other = tiny_run(), tiny_run(seed=1)
    claim_run_folder(tmp_path, run)
    before = (tmp_path / RUN_FILE).read_bytes()
    with pytest.raises(ArtifactError) as caught:
        claim_run_folder(tmp_path, other)
    message = str(caught.value)
    assert run.fingerprint in message
    assert other.fingerprint in message
    assert "--set name=" in message
    assert (tmp_path / RUN_FILE).read_bytes() == before


def test_unreadable_run_file_is_refused(tmp_path):
    (tmp_path / RUN_FILE).write_text("name: tiny\nsurprise: 1\n")
    with pytest.raises(ArtifactError, match=r"run\.yaml that cannot be read: (.|\n)*surprise"):
        claim_run_folder(tmp_path, tiny_run())
    assert (tmp_path / RUN_FILE).read_text() == "name: tiny\nsurprise: 1\n"


def test_unwritable_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"cannot be written: .*placement\.storage_path"):
        claim_run_folder(tmp_path / "file" / "tiny", tiny_run())


def test_run_without_fingerprint_is_another_run():
    refuse_other_run("a", "1", "1", "there")
    with pytest.raises(ArtifactError, match="that rayembed did not make"):
        refuse_other_run("a", "1", None, "there")
