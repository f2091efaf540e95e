"""No value of a Parquet file or an Arrow stream is unpickled, wherever Ray Data was imported."""

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data  # noqa: F401 - registers Ray's type of pickled values with Arrow
from ray.data._internal.object_extensions.arrow import ArrowPythonObjectArray, ArrowPythonObjectType

from rayembed.assets import arrow_files
from rayembed.assets.arrow_files import (
    check_plain,
    open_parquet,
    parquet_bytes,
    read_sealed,
    read_stream,
)
from rayembed.data.engine.parts import SCHEMA
from rayembed.data.plan import batch_plan
from rayembed.data.plan.batch_plan import TRAINING, StepFiles, write_steps
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import read_rows
from rayembed.errors import ArtifactError, DataError


def read_parquet(content, columns=None):
    return open_parquet(pa.BufferReader(content)).read(columns)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def sprung(tmp_path):
    return tmp_path / "sprung"


@pytest.fixture
def table(sprung):
    return pa.table({"query": ArrowPythonObjectArray.from_objects([Trap(sprung)]), "text": ["a"]})


def as_parquet(table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def test_a_pickle_in_a_parquet_file_is_refused_and_not_run(table, sprung):
    content = as_parquet(table)
    for read in (read_parquet, lambda c: open_parquet(pa.BufferReader(c))):
        with pytest.raises(pa.ArrowInvalid, match=r"'query' has the type 'ray.data.arrow_pickled"):
            read(content)
    assert not sprung.exists()
    # What is refused is a trap indeed.
    pq.read_table(pa.BufferReader(content)).to_pylist()
    assert sprung.exists()


def test_a_data_set_with_such_a_column_is_refused(table, sprung, tmp_path):
    path = tmp_path / "pairs.parquet"
    path.write_bytes(as_parquet(table))
    with pytest.raises(DataError, match="which runs code when its values are read"):
        [row for piece in list_pieces(str(path)) for row in read_rows(piece)]
    assert not sprung.exists()


def test_a_pickle_in_an_arrow_stream_is_refused(table, sprung):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(pa.ArrowInvalid, match="pickled"):
        read_stream(sink.getvalue())
    assert not sprung.exists()


@pytest.mark.parametrize(
    "nested",
    [
        pa.list_(ArrowPythonObjectType()),
        pa.struct([("a", pa.list_(pa.struct([("b", ArrowPythonObjectType())])))]),
        pa.map_(pa.string(), ArrowPythonObjectType()),
        pa.opaque(pa.struct([("inner", ArrowPythonObjectType())]), "any", "vendor"),
    ],
    ids=["list", "struct", "map", "storage"],
)
def test_a_nested_one_is_refused(nested):
    with pytest.raises(pa.ArrowInvalid, match="pickled"):
        check_plain(pa.schema([("plain", pa.string()), ("deep", nested)]))


def test_texts_numbers_lists_and_arrows_own_types_are_read():
    table = pa.table(
        {
            "text": ["a", None],
            "numbers": [[1, 2], []],
            "words": pa.array(["x", "x"]).dictionary_encode(),
            "fields": [{"a": 1.5}, None],
            "uuid": pa.array([b"0123456789abcdef", None], pa.uuid()),
        }
    )
    assert read_parquet(as_parquet(table)).to_pylist() == table.to_pylist()
    assert read_parquet(as_parquet(table), ["text"]).to_pydict() == {"text": ["a", None]}


class Counting(io.BytesIO):
    """A file that counts how often it is read."""

    reads = 0

    def read(self, size=-1):
        self.reads += 1
        return super().read(size)


def counted(content, monkeypatch):
    file = Counting(content)
    file.close = lambda: None  # it is opened again
    opened = SimpleNamespace(open_input_file=lambda inside: pa.PythonFile(file, mode="r"))
    monkeypatch.setattr(arrow_files, "open_storage", lambda path: (opened, path))
    return file


def test_a_sealed_file_is_read_in_two_requests_however_many_columns_and_row_groups(monkeypatch):
    table = pa.table({f"c{i}": list(range(640)) for i in range(20)})
    content = parquet_bytes(table, rows_per_group=64)
    file = counted(content, monkeypatch)
    assert read_sealed("s3://b/file", remedy="").equals(table)
    assert file.reads == 2, "the footer, then all rows"
    plain = Counting(content)
    open_parquet(pa.PythonFile(plain, mode="r"), pre_buffer=False).read()
    assert plain.reads > 200, "the control: a request for each column of each row group"


def test_a_footer_is_read_once_for_several_ranges_of_rows(monkeypatch):
    content = parquet_bytes(pa.table({"a": list(range(64)), "b": list(range(64))}), 16)
    file, footers = counted(content, monkeypatch), {}
    for rows in (range(16), range(16, 32), range(40, 41), range(15, 49), range(63, 64)):
        found = read_sealed("f", ["b"], remedy="", rows=rows, footers=footers)
        assert found["b"].to_pylist() == list(rows)
    assert file.reads == 6


def test_a_row_that_a_file_does_not_have_is_told(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(parquet_bytes(pa.table({"a": list(range(64))}), 16))
    with pytest.raises(
        ArtifactError, match=r"the file has 64 rows, but row 64 was requested\. Make it anew"
    ):
        read_sealed(str(path), remedy="Make it anew", rows=range(60, 65))


ROW = {"id": "d/1", "query": "q", "positives": ["p"], "negatives": [{"text": "n"}] * 7}


def test_a_workers_rows_of_a_plan_are_read_in_two_requests(monkeypatch):
    """Which need not be parted on its rows, and without the columns that no step looks at."""
    steps = 2048
    table = pa.Table.from_pylist([ROW] * steps, SCHEMA)
    table = table.add_column(0, "slot", pa.array(range(steps), pa.int32()))
    table = table.add_column(0, "step", pa.array([0] * steps, pa.int64()))
    written = []
    monkeypatch.setattr(batch_plan, "write_atomic", lambda _, content: written.append(content))
    for groups in (1000, batch_plan.GROUPS_PER_STEP):
        monkeypatch.setattr(batch_plan, "GROUPS_PER_STEP", groups)
        monkeypatch.setattr(batch_plan, "ROWS_PER_GROUP", 1)
        write_steps("folder", table, first_step=0, rows_per_step=steps)
    fine, content = written
    assert pq.read_metadata(io.BytesIO(content)).num_row_groups == 64
    assert len(content) < len(fine) / 2, "the control: a footer of a thousand row groups"
    file = counted(content, monkeypatch)
    found = StepFiles("folder", steps, 1).read(0, 300, 300 + steps // 8, TRAINING)
    assert len(found) == steps // 8
    assert file.reads == 2, "the footer, then the rows"
    assert {*found.column_names} == {name.partition(".")[0] for name in TRAINING}
    assert {*found["negatives"][0][0].as_py()} == {"text", "score", "cross_score"}
    again = counted(content, monkeypatch)
    whole = open_parquet(pa.PythonFile(again, mode="r"), pre_buffer=False)
    whole.read_row_groups(range(8))
    assert again.reads > 150, "the control: a request for each column of each row group"


def test_sealed_files_are_parquet_that_others_read_and_may_be_empty(tmp_path):
    for table in (pa.table({"a": ["x", None]}), pa.table({"a": pa.array([], pa.string())})):
        path = tmp_path / "file.parquet"
        path.write_bytes(parquet_bytes(table))
        assert pq.read_table(path).equals(table)
        assert read_sealed(str(path), remedy="").equals(table)
        assert read_sealed(str(path), ["a"], remedy="").equals(table)


def test_files_of_others_without_checksums_are_read_and_with_them_are_checked():
    table = pa.table({"text": ["a longer text", "b"] * 50})
    assert read_parquet(as_parquet(table)).equals(table)
    sink = pa.BufferOutputStream()
    plain = {"compression": "none", "write_statistics": False}
    pq.write_table(table, sink, write_page_checksum=True, **plain)
    content = sink.getvalue().to_pybytes()
    assert read_parquet(content).equals(table)
    with pytest.raises(OSError, match="CRC"):
        read_parquet(content.replace(b"longer", b"larger", 1))


def test_a_footer_that_another_thread_drops_is_not_missed(tmp_path):
    class Dropped(dict):
        """As where another thread keeps another file's footer just then."""

        def __setitem__(self, path, footer):
            pass

    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_bytes(pa.table({"a": [1, 2]})))
    rows = read_sealed(str(path), remedy="", footers=Dropped())
    assert rows.column("a").to_pylist() == [1, 2]
