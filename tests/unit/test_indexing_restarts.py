"""An index job that is started again with other settings, or after a kill."""

import pytest
from made_up_index import build, dies, settings
from tiny_folders import save_biencoder

from rayembed_extras.indexing import parts
from rayembed_extras.indexing.build import build_index


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_biencoder(tmp_path_factory.mktemp("model") / "tiny")


def test_a_corrected_encoding_reads_the_files_again(model, tmp_path):
    path = tmp_path / "docs.csv"
    path.write_bytes("id,text\na,café dogs\n".encode("latin-1"))

    def run(encoding):
        changes = {"documents__metadata": [], "documents__encoding": encoding}
        return settings(tmp_path / "out", model, path, **changes)

    with pytest.MonkeyPatch.context() as patched, dies(patched, parts, "write_part", 1):
        build_index(run("cp1251"))
    assert build(run("latin-1"))[1]["a"]["text"] == "café dogs"
