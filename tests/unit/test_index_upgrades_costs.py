"""What an upgrade measures and what not, what it says of it, and adapters that are forgotten."""

import shlex

import pytest
from tiny_models import save_encoder
from upgraded_index import COUNT, Index, Watched

import rayembed
from rayembed.errors import ConfigError
from rayembed_extras.index_upgrades import upgrade as upgrades
from rayembed_extras.index_upgrades.job import run_upgrade_job
from rayembed_extras.index_upgrades.switch import known_index
from rayembed_extras.indexing.stores.parquet import ParquetStore


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models in folders."""
    home = tmp_path_factory.mktemp("costs")
    for seed, (name, width) in enumerate({"a": 32, "b": 32, "wide": 48}.items()):
        save_encoder(home / name, seed=seed, hidden_size=width)
    return home


@pytest.fixture
def store(monkeypatch):
    """A store of this process in place of Parquet's."""
    made = Watched()
    monkeypatch.setattr(ParquetStore, "open", lambda self: made)
    return made


@pytest.fixture
def index(home, tmp_path, store):
    made = Index(home, tmp_path)
    made.build()
    return made


@pytest.fixture
def command(index, capsys):
    """Runs the job; returns its exit code, output and log."""

    def run(line):
        words = shlex.split(f"--name docs --storage-path {index.storage} {line}")
        code = run_upgrade_job([*words, "--set", "placement.runtime=local"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_stored_measurement_serves_every_road(index, store, monkeypatch):
    measured = upgrades.upgrade(index.run())
    monkeypatch.setattr(upgrades, "_measured", None)
    for road in ("compatible", "adapter", "auto"):
        assert upgrades.upgrade(index.run(), road).report == measured.report, road
    if measured.recommended.road != "backfill":
        assert store.names == {"docs": "docs_1"}
        done = upgrades.upgrade(index.run(), "backfill")
        assert (done.report, done.recommended) == (measured.report, measured.recommended)
    assert store.names == {"docs": "docs_2"}


def test_a_backfill_measures_nothing(index, store, command, caplog, monkeypatch):
    monkeypatch.setattr(upgrades, "_measured", None)
    code, out, err = command(f"--model {index.home / 'b'} --road backfill")
    assert code == 0, err
    assert "the same command without --road" in err + caplog.text
    assert [line.split()[0] for line in out.splitlines()] == ["Backfilled", "Switched"]
    assert store.names == {"docs": "docs_2"}
    done = upgrades.upgrade(index.run("a", instruction="Find it"), "backfill")
    assert (done.report, done.recommended, done.roads, done.prices) == (None, None, None, ())
    assert done._repr_markdown_().startswith(f"Backfilled {COUNT} texts into docs_3")


def test_an_index_that_is_too_small_to_measure_is_backfilled(index, store):
    for count in (60, 30):  # more than half at once is refused
        del index.rows[count:]
        index.build(update=True)
    upgrades.upgrade(index.run(), "backfill")
    assert store.count("docs_2") == 30


def test_what_measuring_took_is_counted(index, command):
    """Documents by the new model, sentences and words by both."""
    cost = upgrades.upgrade(index.run(maps=["orthogonal", "affine"])).report.measuring
    assert cost.texts > 2 * COUNT
    assert cost.tokens > 3 * cost.texts
    assert 0 < cost.fit_seconds < cost.seconds
    alone = upgrades.upgrade(index.run(maps=["identity"])).report.measuring
    assert COUNT < alone.texts < cost.texts - COUNT // 2, "no map is fitted on sentences"
    code, out, err = command(f"--model {index.home / 'b'} --set maps=[orthogonal,affine]")
    assert code == 0, err
    assert f"Measured   {cost.texts:,} texts embedded by both models, and all maps fitted" in out


def test_a_dry_run_counts_the_texts_of_the_measurement(index, command):
    code, out, err = command(f"--model {index.home / 'b'} --dry-run")
    assert code == 0, err
    assert f"storage_path: {index.storage}" in out
    # 60 fitted documents, each with a sentence and some words; 1,000 further sentences.
    assert "to measure: 120 texts by the new model, and up to 1,120 of their sentences" in err
    assert "for a backfill: all 120 texts" in err
    assert "prices" not in err
    err = command(f"--model {index.home / 'b'} --dry-run --price-per-hour 2 --set maps=[identity]")
    assert "and up to 1,000 of their sentences" in err[2]
    assert "prices come with the measurement" in err[2]


def test_an_adapter_is_forgotten(index, command):
    """Of one model alone, then of all; serving says what it says without an adapter."""
    for name in ("b", "wide"):
        upgrades.upgrade(index.run(name, maps=["orthogonal"]), "adapter")
    folder = index.folder / "outputs/indexes/docs/adapters"
    assert len([*folder.iterdir()]) == 2
    one = f"--model {index.home / 'b'} --forget-adapter"
    code, out, err = command(one)
    assert code == 0, err
    assert out.startswith(f"Removed    adapter orthogonal of {index.home / 'b'} from docs_1")
    with pytest.raises(ConfigError, match=r"no adapter for a model .* --road adapter"):
        rayembed.load(index.home / "b", for_index="docs", output=index.storage)
    assert not index.ready("b", 0.0).holds
    assert rayembed.load(index.home / "wide", for_index="docs", output=index.storage)
    assert len([*folder.iterdir()]) == 1
    code, _, err = command(one)
    assert code == 2
    assert "has no adapter for this model" in err
    assert f"but for {index.home / 'wide'}" in err
    rayembed.upgrade("docs", forget_adapter=True, output=index.storage)
    assert known_index(index.storage, "docs").tables["docs_1"].adapter is None
    with pytest.raises(ConfigError, match="none to forget"):
        rayembed.upgrade("docs", forget_adapter=True, output=index.storage)


def test_a_registry_that_is_not_there_is_named_for_python_too(tmp_path):
    with pytest.raises(rayembed.errors.TrackingError, match=r"--tracking-uri.* output="):
        rayembed.load("models:/docs/1", for_index="docs", output=tmp_path)
