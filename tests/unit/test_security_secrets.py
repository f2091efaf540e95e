"""Secrets come by the environment and stay there: no record of a run has one."""

import contextlib
import inspect
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from settings_leaves import leaves
from tiny_folders import save_nvembed

import rayembed
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.storage import exists, open_storage_for_ray, read_bytes
from rayembed.config.document import without_places
from rayembed.config.evaluation import EvaluationRun
from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.pipeline.checks.files import AtHand
from rayembed.pipeline.register.job import run_register_job
from rayembed.pipeline.run.dry_run import print_dry_run
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed.registry.model_card import model_card
from rayembed.registry.provenance import collect_provenance, node_hardware
from rayembed.registry.run_folder import claim_run_folder
from rayembed.registry.tracking import Tracker
from rayembed.registry.tracking_uri import resolve_tracking_uri

SECRET = "hunter2-0123456789abcdef"
VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HF_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "OPENAI_API_KEY",
    "PGPASSWORD",
    "RAYEMBED_API_KEY",
    "RAY_AUTH_TOKEN",
)


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in VARIABLES:
        monkeypatch.setenv(name, f"{SECRET}-{name}")


def files_with(folder: Path, text: str) -> Iterator[str]:
    """Names of the files, a SQLite database among them, whose bytes hold the text."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and text.encode() in path.read_bytes():
            yield path.name


def record(run, folder: Path) -> str:
    """Everything that a training job writes down of a run before it trains; the model's card."""
    uri = resolve_tracking_uri(None, str(folder))
    run_folder = folder / "runs" / run.name
    run_folder.mkdir(parents=True)
    claim_run_folder(run_folder, run)
    tracker = Tracker.open_for_run(run, uri, run_folder, tags={})
    provenance = collect_provenance(node_hardware())
    tracker.log_resolved_run(run.published())
    tracker.log_provenance({**provenance, "data": {"x": [{"folder": f"{folder}/data/records/x"}]}})
    tracker.set_tags({"rayembed.results": f"{folder}/results/model"})
    assert tracker.close("FINISHED")
    card = model_card(
        run, fingerprint="f", dimensions=32, scores="", provenance=provenance, registered_model="m"
    )
    (run_folder / "README.md").write_text(card)
    return card


def test_secrets_of_the_environment_stand_in_no_record(environment, tmp_path):
    run = override(get_recipe("biencoder-quickstart"), [f"placement.storage_path={tmp_path}"])
    card = record(run, tmp_path)
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"mlflow.db", "run.yaml", "provenance.json", "README.md"} <= written
    assert run.name in card
    assert list(files_with(tmp_path, SECRET)) == []
    shown, told = io.StringIO(), io.StringIO()
    print_dry_run(run, AtHand(run), out=shown, tables=told)
    assert SECRET not in shown.getvalue() + told.getvalue()
    # The control: the search sees a text in the database, the artifacts and the folder.
    record(override(run, ["name=other", f"model.query_prefix={SECRET}"]), tmp_path)
    assert {"mlflow.db", "run.yaml"} <= set(files_with(tmp_path, SECRET))


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """The working directory and home of a user, with a project of uv's in it."""
    home = tmp_path / "home" / "jane-doe"
    project = home / "project"
    project.mkdir(parents=True)
    (project / "pyproject.toml").write_text('[project]\nname = "secret-plans"\nversion = "1"\n')
    (project / "uv.lock").write_text('version = 1\nname = "secret-plans"\n')
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(home))
    for name in ("USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, "jane-doe")
    monkeypatch.setattr("socket.gethostname", lambda: "jane-doe-laptop")
    return home


def test_a_registered_model_names_no_place_of_the_machine(at_home, tmp_path):
    """Its files, tags and card are read by others than who registered it."""
    folder = save_nvembed(at_home / "models" / "exported")
    store = tmp_path / "store"
    uri = resolve_tracking_uri(None, str(store))
    with contextlib.chdir(store):
        # Whoever makes the tables has the working directory in the experiment `Default`.
        MlflowClient(uri, uri).search_experiments()
    arguments = ["--model", str(folder), "--name", "tiny", "--tracking-uri", uri]
    assert run_register_job(arguments, about=None) == 0
    written = {path.name for path in store.rglob("*") if path.is_file()}
    assert {"mlflow.db", "MLmodel", "requirements.txt", "README.md", "rayembed.json"} <= written
    # The control: the last part of the folder's name is told.
    assert {"mlflow.db", "MLmodel"} <= set(files_with(store, "exported"))
    code = str(Path(rayembed.__file__).parent)
    for place in ("jane-doe", "secret-plans", code, str(tmp_path)):
        found = set(files_with(store, place))
        # The database says where the store itself lies, which who reads it has found.
        assert found <= ({"mlflow.db"} if place == str(tmp_path) else set()), (place, found)


def test_what_a_run_sends_names_no_place_of_the_machine(at_home, tmp_path):
    """Its params, tags, settings and provenance: paths are those below the storage, or a name."""
    storage = at_home / "project" / "outputs"
    settings = [
        f"placement.storage_path={storage}",
        f"placement.tracking_uri=sqlite:///{storage}/mlflow.db",
        f"model.backbone.path={at_home}/models/start",
        f"data.datasets.wiki-description.source.path={at_home}/pairs of mine.jsonl",
        f"model.query_prefix=see /{SECRET}",
        "model.document_prefix=/no_think find pages and/or passages",
        "data.datasets.wiki-sentence.source.path=../jane-doe/titles.jsonl",
    ]
    run = override(get_recipe("biencoder-quickstart"), settings)
    record(run, storage)
    uri = resolve_tracking_uri(None, str(storage))
    client = MlflowClient(uri, uri)
    (found,) = client.search_runs([client.get_experiment_by_name("rayembed").experiment_id])
    told = {**found.data.params, **found.data.tags}
    assert told["model.backbone.path"] == "start"
    assert told["model.document_prefix"] == "/no_think find pages and/or passages"
    assert told["rayembed.results"] == "results/model"
    assert told["placement.storage_path"] == "outputs"
    artifacts = storage / "mlflow_artifacts"
    assert "pairs of mine.jsonl" in "".join(told.values())
    assert set(files_with(artifacts, "data/records/x")) == {"provenance.json"}
    for prefix in (run.model.query_prefix, run.model.document_prefix):
        assert set(files_with(artifacts, prefix)) == {"run.yaml"}
    assert "jane-doe" not in "".join(told.values())
    assert list(files_with(artifacts, "jane-doe")) == []
    # The control: the run's own folder has the settings as they were given.
    assert "run.yaml" in set(files_with(storage / "runs", str(at_home)))


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("/home/jo/out/data/records/x", "data/records/x"),
        ("/home/jo/out", "out"),
        ("/home/jo/models/my model", "my model"),
        ("st:/home/jo/m", "m"),
        ("file:///home/jo/out/a/b", "a/b"),
        ("sqlite:////home/jo/out/mlflow.db", "mlflow.db"),
        ("sqlite+pysqlite:////home/jo/a%2520b/mlflow.db", "mlflow.db"),
        ("~/models/m", "m"),
        ("~jo/models/m", "m"),
        ("/home/jo/output/x", "x"),
        ("../jo/models/m", "m"),
        ("./../../jo/models/m", "m"),
        # Within a sentence, as warnings name a page.
        (
            "3 rows; examples: /home/jo/out/data/records/x/audit.html",
            "3 rows; examples: data/records/x/audit.html",
        ),
        # No local paths.
        ("data/x", "data/x"),
        ("s3://bucket/home/jo", "s3://bucket/home/jo"),
        ("models:/name/3", "models:/name/3"),
        ("query: a/b", "query: a/b"),
        ("/ or / and", "/ or / and"),
        ("//", "//"),
        ("~", "~"),
        (3, 3),
        (None, None),
        ({"/home/jo/k": ["/home/jo/v", {"a": "/home/jo/out/w"}]}, {"k": ["v", {"a": "w"}]}),
    ],
)
def test_local_paths_are_sent_by_what_is_below_the_storage(given, sent):
    assert without_places(given, "/home/jo/out") == sent
    assert without_places(given) == without_places(given, "s3://bucket/runs")


@pytest.mark.parametrize(
    "text",
    ["/query: find me", "/a b/c d/e", "/no_think find pages and/or passages", "~/x: ", "../y: "],
)
def test_a_text_that_looks_like_a_path_is_published_as_it_is(text):
    """A prefix and an instruction, among settings whose paths are shortened."""
    own = {"kind": "retrieval", "name": "own", "path": "/home/jo/own", "instruction": text}
    values = {
        "model": {"reference": "/home/jo/m", "prompts": {"query_prefix": text}},
        "own_sets": [own],
        "placement": {"storage_path": "/home/jo/out"},
    }
    sent = yaml.safe_load(parse(EvaluationRun, values).published())
    assert sent["model"]["prompts"]["query_prefix"] == text
    assert sent["own_sets"][0]["instruction"] == text
    assert (sent["model"]["reference"], sent["own_sets"][0]["path"]) == ("m", "own")


def test_a_sentence_does_not_name_the_home_folder(at_home):
    told = f"2 rows of {at_home}/pairs.jsonl; see {at_home}/out/audit.html"
    assert without_places([told], f"{at_home}/out") == ["2 rows of ~/pairs.jsonl; see audit.html"]


def test_the_files_of_an_evaluation_name_no_place_of_the_machine(at_home):
    values = {
        "model": {"reference": f"{at_home}/models/m"},
        "tasks": ["NFCorpus"],
        "benchmarks": [f"wikipedia?source={at_home}/articles.jsonl"],
        "placement": {"storage_path": f"{at_home}/outputs"},
    }
    text = parse(EvaluationRun, values).published()
    assert "jane-doe" not in text
    assert "storage_path: outputs" in text
    assert "NFCorpus" in text


ADDRESS = f"s3://KEYID:{SECRET}@bucket/folder"

WORDS = (
    "document_instruction document_prefix instruction instruction_template instructions prompt_end"
)
WORDS += " prompt_start query_instruction query_prefix"
COLUMNS = (
    "contradiction document document_id entailment first hypothesis label language names positive"
)
COLUMNS += " premise query query_id score second text"
NAMES = "experiment registered_model split subset task"
FREE_TEXTS = {*WORDS.split(), *COLUMNS.split(), *NAMES.split()}
"""Texts that are no addresses: words before a text, columns of a file, names of other things."""


def texts_of(run):
    """Path and name of each setting of a run that takes any text, of alike data sets once."""
    seen = set()
    for leaf in leaves(run):
        words = tuple(part for part in leaf.path if not isinstance(part, int))
        if leaf.annotation not in (str, str | None) or words in seen:
            continue
        seen.add(words)
        place, dotted = run, []
        for part in leaf.path:
            inside = isinstance(place, tuple | dict)
            place = place[part] if inside else getattr(place, part)
            named = getattr(place, "name", part) if isinstance(part, int) else part
            dotted.append(str(named))
        mapping = {"instructions", "names"}.intersection(words[:-1])
        yield ".".join(dotted), mapping.pop() if mapping else words[-1]


@pytest.mark.parametrize("name", recipe_names())
def test_every_setting_that_may_hold_an_address_refuses_one_with_a_password(name):
    run = get_recipe(name)
    accepted, messages = set(), []
    for dotted, field in texts_of(run):
        try:
            override(run, [f"{dotted}={ADDRESS}"])
            accepted.add(field)
        except ConfigError as error:
            if field not in FREE_TEXTS:
                messages.append(str(error))
    assert accepted <= FREE_TEXTS
    assert messages
    assert not any(SECRET in message for message in messages)


@pytest.mark.parametrize(
    "setting",
    [
        f"placement.tracking_uri=http://user:{SECRET}@mlflow:5000",
        f"placement.storage_path=s3://KEYID:{SECRET}@bucket/runs",
        f"data.root=s3://bucket/data?secret_key={SECRET}",
        f"model.backbone.path=https://{SECRET}@host/model",
    ],
)
def test_a_job_with_a_password_in_an_address_ends_before_it_writes(
    setting, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert training_job("biencoder-quickstart")(["--set", setting]) == 2
    told = capsys.readouterr()
    assert "Leave it out and set the environment" in told.err
    assert SECRET not in told.err + told.out
    assert list(tmp_path.iterdir()) == []


ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "jobs").rglob("*.py"))


def command(script: str, *argv: str) -> tuple[object, str]:
    """Exit code and whole output of a job's script."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as ended:
            return ended.code, said.getvalue()
    return None, said.getvalue()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_of_every_job_refuses_an_address_with_a_password(
    script, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    if script.endswith("analyse_context.py"):
        monkeypatch.setattr(sys, "argv", [script, "topics", "--help"])
    first = sys.argv[1:-1]
    flags = set(re.findall(r"^ +(--[a-z-]+)(?: |$)", command(script)[1], re.MULTILINE))
    assert "--help" in flags or len(flags) > 1
    others = [[f"--no-such-option={ADDRESS}"], [ADDRESS]]
    asked = [[flag, ADDRESS] for flag in sorted(flags)] + others
    for argv in [*asked, *([f"{flag}={address}"] for flag, address in asked[: len(flags)])]:
        monkeypatch.setattr(sys, "argv", [script, *first, *argv])
        code, said = command(script)
        assert code == 2, (argv[0], said)
        assert "Leave it out and set the environment" in said, argv[0]
        assert SECRET not in said, argv[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "open_it",
    [
        resolve,
        resolve_model,
        exists,
        read_bytes,
        open_storage_for_ray,
        lambda address: resolve_tracking_uri(address, "outputs"),
        lambda address: resolve_tracking_uri(None, address),
    ],
)
@pytest.mark.parametrize("address", [ADDRESS, f"http://bob:{SECRET}@host/x", f"st:{ADDRESS}"])
def test_what_opens_an_address_refuses_one_with_a_password(open_it, address):
    with pytest.raises(ConfigError, match="Leave it out") as error:
        open_it(address)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("variable", "read"),
    [
        ("AWS_ENDPOINT_URL", lambda: exists("s3://bucket/x")),
        ("AWS_ENDPOINT_URL_S3", lambda: open_storage_for_ray("s3://bucket/x")),
        ("HF_ENDPOINT", lambda: resolve_model("hf://org/name@main")),
        ("MLFLOW_TRACKING_URI", lambda: rayembed.load("models:/name@champion")),
    ],
)
def test_an_address_of_the_environment_with_a_password_is_refused(variable, read, monkeypatch):
    monkeypatch.setenv(variable, f"http://bob:{SECRET}@host:9000")
    with pytest.raises(ConfigError, match="Leave it out") as error:
        read()
    assert SECRET not in str(error.value)


CALLS = {name: getattr(rayembed, name) for name in ("adapt", "evaluate", "load", "mine", "train")}
NO_ADDRESS = {
    "baselines", "batch_size", "callbacks", "device", "epochs", "learning_rate", "loss",
    "num_negatives", "query_instruction", "steps", "workers",
}  # fmt: skip
REQUIRED = {
    "model": "all-MiniLM-L6-v2",
    "pairs": [("a", "b")],
    "corpus": ["a text"],
    "tasks": "NFCorpus",
}


def arguments() -> Iterator[tuple[str, str]]:
    """Calls with each of their parameters, of which a new one must be refused or named above."""
    for name, call in CALLS.items():
        for parameter in inspect.signature(call).parameters:
            if parameter not in NO_ADDRESS:
                yield name, parameter


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(("name", "parameter"), list(arguments()))
def test_every_argument_of_a_call_refuses_an_address_with_a_password(
    name, parameter, kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    values = {
        key: REQUIRED[key] for key in inspect.signature(CALLS[name]).parameters.keys() & REQUIRED
    }
    values[parameter] = {"x.y": ADDRESS} if parameter == "settings" else kind(ADDRESS)
    with pytest.raises(ConfigError, match="Leave it out") as error:
        CALLS[name](**values)
    assert SECRET not in str(error.value)
    assert list(tmp_path.iterdir()) == []
