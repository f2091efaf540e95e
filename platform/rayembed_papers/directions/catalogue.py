"""List the papers' claims that one run scores higher than another, with table and scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.models.causal2vec.config import ExamplesConfig
from rayembed.recipes.sample import CROSS_LINGUAL, MINILM, RETRIEVAL_TASKS, TASK_NAMES
from rayembed_papers import ablations
from rayembed_papers.directions import synthetic
from rayembed_papers.directions.causes import COLDER, DEEPER, LARGER, LONGER, Cause, with_steps
from rayembed_papers.directions.small import (
    causal2vec_small,
    cde_small,
    encoder_small,
    nomic_small,
    nvembed_small,
    of_pairs,
)
from rayembed_papers.printed import rows_of
from rayembed_papers.tables.encoder_rows import plain, random_batches

MakeRun = Callable[[], Run]

NOTHING = 0.005
"""Largest loss that counts as no loss when a paper claims that a method costs nothing: half a
percentage point."""


@dataclass(frozen=True)
class Preparation:
    """A file that a run reads in addition to the sample, made once in a storage before the first
    seed.
    """

    file: str
    """Path below the storage."""
    seconds_left: Callable[[str], float]
    """Expected seconds to make it in the storage of this path; 0: it exists."""
    make: Callable[[str], None]
    """Make it in the storage of this path, unless it exists."""


@dataclass(frozen=True)
class Direction:
    """A claim of a paper that one method is better than another."""

    key: str
    claim: str
    source: str
    """Paper and table, figure or section."""
    better: MakeRun
    worse: MakeRun
    printed: float | None = None
    """The paper's difference in percentage points; None: it does not print both scores."""
    tasks: Sequence[str] = RETRIEVAL_TASKS
    """Tasks of the sample whose mean score is compared."""
    costs_nothing: bool = False
    """Whether the claim is that the first run loses nothing to the second."""
    causes: tuple[Cause, ...] = ()
    preparation: Preparation | None = None
    """Preparation that `better` needs; None: the sample is enough."""
    note: str = ""
    """Note on the difference for the reader."""


_EXAMPLE_TOKENS = 160
"""Tokens reserved for in-context examples before a query."""

_EXAMPLES = {
    **ablations.EXAMPLES,
    "WikiTopicClassification": (
        (
            "It stands still in shallow water and waits for fish. It nests in colonies in trees.",
            "Biology and health sciences",
        ),
    ),
    "WikiTopicClustering": (
        (
            "It is a dark rock that forms where lava cools quickly, and covers most sea floors.",
            "Physical sciences",
        ),
    ),
}
"""In-context examples of the tasks that have an instruction, written for these runs."""


def directions() -> tuple[Direction, ...]:
    """Read all claims of `claims.csv`, paper by paper."""
    return tuple(map(_direction, rows_of(__package__, "claims")))


def _direction(row: dict[str, str]) -> Direction:
    texts = {name: row[name] for name in ("key", "claim", "source", "note")}
    return Direction(
        **texts,
        better=partial(_run, row["better"]),
        worse=partial(_run, row["worse"]),
        printed=float(row["printed"]) if row["printed"] else None,
        tasks=_TASKS[row["tasks"]],
        costs_nothing=bool(row["costs_nothing"]),
        causes=tuple(_CAUSES[name] for name in row["causes"].split()),
        preparation=_SYNTHETIC if row["better"] == "nvembed-synthetic" else None,
    )


def _run(text: str) -> Run:
    """Build a run of `_RUNS` by its name, changed by the assignments that follow the name."""
    name, *assignments = text.split("; ")
    return override(_RUNS[name](), assignments)


def get_directions(keys: Sequence[str]) -> tuple[Direction, ...]:
    """Return the claims with these keys, or all claims if no keys are given.

    Raises:
        ConfigError: no such key; the message names the nearest one.
    """
    known = {one.key: one for one in directions()}
    for key in keys:
        if key not in known:
            raise ConfigError(f"there is no paper claim {key!r} to measure; {nearest(key, known)}")
    return tuple(one for key, one in known.items() if key in keys or not keys)


def followed_up(direction: Direction, cause: Cause) -> Direction:
    """Copy a claim with both runs changed to exclude one likely cause of its reversal."""
    return replace(
        direction,
        key=f"{direction.key}, {cause.name}",
        claim=f"{direction.claim}, {cause.name}",
        better=lambda: cause.change(direction.better()),
        worse=lambda: cause.change(direction.worse()),
        causes=(),
    )


def on_a_gpu(direction: Direction) -> Direction:
    """Copy a claim at a larger size for a GPU: all layers of the backbones, all pairs, five times
    the steps.
    """

    def larger(make: MakeRun) -> MakeRun:
        def whole() -> Run:
            run = with_steps(5, make())
            rows = (f"data.datasets.{d.name}.num_samples=null" for d in run.data.datasets)
            return override(
                run, ["model.backbone.num_layers=null", "placement.use_gpu=true", *rows]
            )

        return whole

    causes = tuple(one for one in direction.causes if one is not DEEPER)
    better, worse = larger(direction.better), larger(direction.worse)
    # Notes describe the small runs.
    return replace(direction, better=better, worse=worse, causes=causes, note="")


_TASKS: Mapping[str, Sequence[str]] = {
    "all": TASK_NAMES,
    "retrieval": RETRIEVAL_TASKS,
    "cross-lingual": (CROSS_LINGUAL,),
}
_CAUSES = {"longer": LONGER, "deeper": DEEPER, "larger": LARGER, "colder": COLDER}

_SYNTHETIC = Preparation(synthetic.PAIRS_FILE, synthetic.seconds_left, synthetic.write_pairs)


def _of_topics(assignment: str) -> list[str]:
    names = ("wiki-topic-classification", "wiki-topic-clustering")
    return [f"data.datasets.{name}.{assignment}" for name in names]


def _random(run: Run) -> Run:
    return random_batches(run, cde_small().stages[0].batch.global_pairs)


def _mined(number: int) -> Run:
    """The small bi-encoder's run with `number` mined negatives for each query."""
    batch = f"stages.finetune.batch.num_negatives={number}"
    return override(encoder_small(), [batch, *of_pairs(f"mining.num_negatives={number}")])


def _unmined(*more: str) -> Run:
    """The small bi-encoder's run with only in-batch negatives."""
    batch = "stages.finetune.batch.num_negatives=0"
    return override(encoder_small(), [batch, *of_pairs("mining=null"), *more])


def _with_room() -> Run:
    run = causal2vec_small()
    length = run.model.query_max_length + _EXAMPLE_TOKENS
    return override(run, [f"model.query_max_length={length}"])


def _with_examples() -> Run:
    limits = ExamplesConfig(
        max_examples=2, query_tokens=24, response_tokens=32, max_tokens=_EXAMPLE_TOKENS
    )
    length = _with_room().model.query_max_length
    return ablations.with_examples(
        causal2vec_small(), "examples", limits, _EXAMPLES, query_max_length=length
    )


_NEAREST = of_pairs("mining.rule.kind=top_k")
_FILTER = of_pairs(f"consistency={{teacher: '{MINILM}', max_length: 64}}")
_UNFILTERED = of_pairs("clusters.false_negative_margin=null")

_RUNS: Mapping[str, MakeRun] = {
    "nvembed": nvembed_small,
    "nvembed-single": lambda: ablations.single_stage(nvembed_small(), "single", in_batch=False),
    "nvembed-single-in-batch": lambda: ablations.single_stage(
        nvembed_small(), "single", in_batch=True
    ),
    "nvembed-reversed": lambda: ablations.reversed_stages(nvembed_small(), "reversed"),
    "nvembed-labels": lambda: override(nvembed_small(), _of_topics("source.label_form=label")),
    # The paper's table has mined negatives against none, which the second stage needs.
    "nvembed-nearest": lambda: override(nvembed_small(), _NEAREST),
    "nvembed-synthetic": lambda: synthetic.with_questions(nvembed_small(), "synthetic"),
    "nomic": nomic_small,
    "nomic-dense": lambda: ablations.dense(nomic_small(), "dense"),
    "encoder": encoder_small,
    "encoder-nearest": lambda: override(encoder_small(), _NEAREST),
    "encoder-10": lambda: _mined(10),
    "encoder-in-batch": _unmined,
    "encoder-filtered": lambda: _unmined(*_FILTER),
    "cde": cde_small,
    "cde-random": lambda: _random(cde_small()),
    "cde-plain": lambda: plain(cde_small()),
    "cde-plain-random": lambda: _random(plain(cde_small())),
    "cde-plain-unfiltered": lambda: override(plain(cde_small()), _UNFILTERED),
    "causal2vec": causal2vec_small,
    "causal2vec-last-token": lambda: ablations.last_token(causal2vec_small(), "last-token"),
    "causal2vec-with-room": _with_room,
    "causal2vec-examples": _with_examples,
    # The paper's other model is bge-en-icl, with up to four times as many tokens.
    "causal2vec-examples-last-token": lambda: ablations.last_token(
        _with_examples(), "last-token-with-examples"
    ),
}
"""Runs compared in claims, by their names in `claims.csv`."""
