"""A storage that does not answer is told apart from a file that is missing or broken."""

import pytest

from rayembed.data.engine.parts import read_table
from rayembed.data.engine.shuffle import read_bucket
from rayembed.data.plan.batch_plan import StepFiles, file_name
from rayembed.errors import ArtifactError, StorageError

READERS = {
    "part": lambda folder: read_table(str(folder / file_name(0))),
    "plan": lambda folder: StepFiles(str(folder), 1, 1).read(0, 0, 1, ["query"]),
    "bucket": lambda folder: read_bucket([str(folder / file_name(0))], 0),
}


@pytest.mark.parametrize("name", READERS)
def test_only_a_storage_that_does_not_answer_is_worth_another_try(name, tmp_path):
    path = tmp_path / file_name(0)
    with pytest.raises(ArtifactError) as missing:
        READERS[name](tmp_path)
    path.write_bytes(b"no rows")
    with pytest.raises(ArtifactError) as broken:
        READERS[name](tmp_path)
    path.unlink()
    path.symlink_to(path)  # "too many levels of symbolic links"
    with pytest.raises(StorageError):
        READERS[name](tmp_path)
    assert [type(error.value) for error in (missing, broken)] == [ArtifactError, ArtifactError]
