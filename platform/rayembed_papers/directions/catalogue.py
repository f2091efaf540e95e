"""The claims: a run that a paper finds better than another, with its table and figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.models.causal2vec.config import ExamplesConfig
from rayembed.recipes import causal2vec, nomic, nvembed
from rayembed.samples.assets import MINILM
from rayembed.samples.references import CROSS_LINGUAL, RETRIEVAL_TASKS, TASK_NAMES
from rayembed_papers.directions import synthetic
from rayembed_papers.directions.causes import COLDER, DEEPER, LARGER, LONGER, Cause, with_steps
from rayembed_papers.directions.notes import NOTES
from rayembed_papers.directions.small import (
    causal2vec_small,
    cde_small,
    encoder_small,
    nomic_small,
    nvembed_small,
)
from rayembed_papers.tables.encoder_rows import plain, random_batches

MakeRun = Callable[[], Run]

NOTHING = 0.005
"""Loss that counts as none, where a paper says that something costs nothing: half a point of a
hundred."""


@dataclass(frozen=True)
class Preparation:
    """A file that a run reads beside the sample, made once in a storage before the first seed."""

    file: str
    """Path below the storage."""
    seconds_left: Callable[[str], float]
    """Expected seconds of making it in the storage of this path; 0: it is there."""
    make: Callable[[str], None]
    """Makes it in the storage of this path, unless it is there."""


@dataclass(frozen=True)
class Direction:
    """What a paper finds better than what."""

    key: str
    claim: str
    source: str
    """Paper and table, figure or section."""
    better: MakeRun
    worse: MakeRun
    printed: float | None = None
    """The paper's difference, of 100; None: it prints no number of both."""
    tasks: Sequence[str] = RETRIEVAL_TASKS
    """Tasks of the sample whose mean score is compared."""
    costs_nothing: bool = False
    """Whether the claim is that the first run loses nothing to the second."""
    causes: tuple[Cause, ...] = ()
    preparation: Preparation | None = None
    """Of what `better` reads; None: the sample is all."""
    note: str = ""
    """What a reader of the difference must know beside it."""


_EXAMPLE_TOKENS = 160
"""Room for in-context examples before a query."""

_EXAMPLES = {
    **causal2vec.EXAMPLES,
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
    """All claims, paper by paper."""
    found = (*_nvembed(), *_nomic(), *_cde(), *_causal2vec())
    return tuple(replace(one, note=NOTES.get(one.key, "")) for one in found)


def get_directions(keys: Sequence[str]) -> tuple[Direction, ...]:
    """The claims of these keys; all where none is named.

    Raises:
        ConfigError: no such key; the message names the nearest one.
    """
    known = {one.key: one for one in directions()}
    for key in keys:
        if key not in known:
            raise ConfigError(f"there is no direction {key!r}; {nearest(key, known)}")
    return tuple(one for key, one in known.items() if key in keys or not keys)


def followed_up(direction: Direction, cause: Cause) -> Direction:
    """The same claim of runs in which the cause would not act."""
    return replace(
        direction,
        key=f"{direction.key}, {cause.name}",
        claim=f"{direction.claim}, {cause.name}",
        better=lambda: cause.change(direction.better()),
        worse=lambda: cause.change(direction.worse()),
        causes=(),
    )


def on_a_gpu(direction: Direction) -> Direction:
    """The same claim at a larger size: all layers of the backbones, all pairs of the sample, five
    times the steps, a GPU.
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
    # Notes tell of the small runs.
    return replace(direction, better=better, worse=worse, causes=causes, note="")


def _with(base: MakeRun, *assignments: str) -> MakeRun:
    return lambda: override(base(), list(assignments))


def _nvembed() -> tuple[Direction, ...]:
    base = nvembed_small
    topics = ("wiki-topic-classification", "wiki-topic-clustering")
    mined = ("wiki-description", "wiki-sentence")

    def claim(
        key: str, claim: str, table: int, printed: float, better: MakeRun, worse: MakeRun
    ) -> Direction:
        source = f"NV-Embed, Table {table}"
        causes = (LONGER, DEEPER)
        return Direction(key, claim, source, better, worse, printed, TASK_NAMES, causes=causes)

    def single(*, in_batch: bool) -> MakeRun:
        return lambda: nvembed.single_stage(base(), "single", in_batch=in_batch)

    pooled = {kind: _with(base, f"model.pooling={{kind: {kind}}}") for kind in ("mean", "eos")}
    attended = _with(base, "model.pooling.kind=self_attention")
    return (
        claim(
            "mask",
            "bidirectional > causal attention",
            3,
            0.70,
            base,
            _with(base, "model.mask=causal"),
        ),
        claim("latent-mean", "latent attention > mean", 3, 0.60, base, pooled["mean"]),
        claim("mean-eos", "mean > last token", 3, 0.08, pooled["mean"], pooled["eos"]),
        claim("latent-self", "latent > self-attention", 3, 0.70, base, attended),
        claim("two-stages", "two stages > one", 4, 0.37, base, single(in_batch=False)),
        claim(
            *("stage-order", "retrieval first > all data first", 4, 0.46, base),
            lambda: nvembed.reversed_stages(base(), "reversed"),
        ),
        claim(
            *("in-batch", "a single stage without in-batch negatives > with them", 4, 1.11),
            *(single(in_batch=False), single(in_batch=True)),
        ),
        claim(
            *("examples", "classes by examples > by labels", 4, 1.49, base),
            _with(base, *(f"data.datasets.{name}.source.label_form=label" for name in topics)),
        ),
        Direction(
            # The paper's table has mined negatives against none, which the second stage needs.
            *("positive-aware", "positive-aware mining > the nearest", "NV-Embed, section 4.1.1"),
            base,
            _with(base, *(f"data.datasets.{name}.mining.rule.kind=top_k" for name in mined)),
            tasks=TASK_NAMES,
            causes=(LONGER, DEEPER),
        ),
        replace(
            claim(
                *("synthetic", "with synthetic pairs > without", 4, 0.24),
                *(lambda: synthetic.with_questions(base(), "synthetic"), base),
            ),
            preparation=Preparation(
                synthetic.PAIRS_FILE, synthetic.seconds_left, synthetic.write_pairs
            ),
        ),
    )


def _nomic() -> tuple[Direction, ...]:
    base, mined = nomic_small, encoder_small
    pairs = ("wiki-description", "wiki-sentence")
    consistency = f"{{teacher: '{MINILM}', max_length: 64}}"
    in_batch = _with(
        mined,
        "stages.finetune.batch.num_negatives=0",
        *(f"data.datasets.{name}.mining=null" for name in pairs),
    )

    def number(negatives: int) -> MakeRun:
        return _with(
            mined,
            f"stages.finetune.batch.num_negatives={negatives}",
            *(f"data.datasets.{name}.mining.num_negatives={negatives}" for name in pairs),
        )

    def of(where: str) -> str:
        return f"Nomic Embed v2 MoE, {where}"

    longer = (LONGER, COLDER)
    return (
        Direction(
            *("moe", "experts > dense at equal active parameters", of("Table 9"), base),
            *(lambda: nomic.dense(base(), "dense"), 0.29),
            causes=longer,
        ),
        Direction(
            *("moe-layers", "experts in every other layer > in every layer", of("Table 7"), base),
            *(_with(base, "model.experts.every=1"), 0.41),
            causes=(LARGER, *longer),  # with its smallest batches the paper has it the other way
        ),
        Direction(
            *("upcycled", "upcycled experts > experts drawn anew"),
            *(of("section 4.3; arXiv 2212.05055"), base),
            _with(base, "model.experts.start=random"),
            causes=longer,
        ),
        Direction(
            *("margin", "mining with a margin of 0.95 > without", of("Table 8"), mined),
            *(
                _with(mined, *(f"data.datasets.{name}.mining.rule.kind=top_k" for name in pairs)),
                2.33,
            ),
            causes=longer,
        ),
        Direction(
            *("negatives", "10 mined negatives > 4", of("Table 8"), number(10), mined, 0.23),
            causes=longer,
        ),
        Direction(
            *("filter", "consistency filter > none", of("section 4.2")),
            _with(in_batch, *(f"data.datasets.{name}.consistency={consistency}" for name in pairs)),
            in_batch,
            causes=longer,
        ),
        Direction(
            *("matryoshka", "Matryoshka costs the full width nothing", of("section 4.5"), base),
            _with(base, "model.dimensions=[]", "stages.finetune.loss.dimensions=[]"),
            costs_nothing=True,
            causes=longer,
        ),
        Direction(
            *("cross-lingual", "pairs of two languages help across languages", "of our own"),
            base,
            _with(
                base, "stages.pretrain.datasets={sentence-en: 1, sentence-fr: 1, sentence-es: 1}"
            ),
            tasks=(CROSS_LINGUAL,),
            causes=longer,
        ),
    )


def _cde() -> tuple[Direction, ...]:
    both = cde_small

    def batches() -> Run:
        return plain(both())

    def drawn(make: MakeRun) -> MakeRun:
        return lambda: random_batches(make(), both().stages[0].batch.global_pairs)

    pairs = ("wiki-description", "wiki-sentence")
    unfiltered = _with(
        batches, *(f"data.datasets.{name}.clusters.false_negative_margin=null" for name in pairs)
    )

    def claim(
        key: str, claim: str, where: str, printed: float | None, better: MakeRun, worse: MakeRun
    ) -> Direction:
        # What neighbours do to a batch depends on how many it has.
        causes = (LARGER, LONGER, DEEPER) if key == "clusters" else (LONGER, DEEPER)
        return Direction(key, claim, f"CDE, {where}", better, worse, printed, causes=causes)

    return (
        claim("clusters", "clustered > random batches", "Table 1", 1.8, batches, drawn(batches)),
        claim("context", "context > none", "Table 1", 2.5, drawn(both), drawn(batches)),
        claim("context-clusters", "context and clusters > clusters", "Table 1", 1.4, both, batches),
        claim(
            "clusters-context", "context and clusters > context", "Table 1", 0.7, both, drawn(both)
        ),
        claim(
            "false-negatives",
            "false negatives left out > kept",
            "Figure 4",
            None,
            batches,
            unfiltered,
        ),
        claim(
            *("dropout", "sequence dropout > none", "section 4.2", None, both),
            _with(both, "model.sequence_dropout=0"),
        ),
    )


def _causal2vec() -> tuple[Direction, ...]:
    base = causal2vec_small

    def claim(
        key: str, claim: str, table: int, printed: float, better: MakeRun, worse: MakeRun
    ) -> Direction:
        source = f"Causal2Vec, Table {table}"
        causes = (LONGER, DEEPER)
        return Direction(key, claim, source, better, worse, printed, TASK_NAMES, causes=causes)

    def represented(kind: str) -> MakeRun:
        return _with(base, f"model.representation={kind}")

    with_room = base().model.query_max_length + _EXAMPLE_TOKENS

    def with_examples() -> Run:
        limits = ExamplesConfig(
            max_examples=2, query_tokens=24, response_tokens=32, max_tokens=_EXAMPLE_TOKENS
        )
        return causal2vec.with_examples(
            base(), "examples", limits, _EXAMPLES, query_max_length=with_room
        )

    return (
        claim(
            *("contextual-token", "Contextual token > last token alone", 2, 0.38),
            *(represented("eos"), lambda: causal2vec.last_token(base(), "last-token")),
        ),
        claim(
            "concat",
            "concatenation > last token after the Contextual one",
            2,
            0.64,
            base,
            represented("eos"),
        ),
        claim("concat-average", "concatenation > average", 12, 0.16, base, represented("average")),
        claim(
            *("concat-encoder", "the LLM's Contextual state > the encoder's", 12, 0.39, base),
            represented("concat_encoder"),
        ),
        claim(
            *("one-token", "one Contextual token > eight", 5, 0.16, base),
            _with(base, "model.num_contextual_tokens=8"),
        ),
        claim(
            *("tuned-encoder", "encoder tuned > frozen, with a small LLM", 10, 0.26, base),
            _with(base, "model.encoder.lora=null", "model.encoder.frozen=true"),
        ),
        claim(
            *("position", "Contextual token after the instruction > before it", 14, 0.14, base),
            _with(base, "model.position=before_instruction"),
        ),
        claim(
            *("causal", "causal > bidirectional attention", 15, 0.31, base),
            _with(base, "model.mask=bidirectional"),
        ),
        claim(
            *("in-context", "in-context examples > none", 1, 0.75, with_examples),
            _with(base, f"model.query_max_length={with_room}"),
        ),
        Direction(
            # The paper's other model is bge-en-icl, with up to four times as many tokens.
            *("lengths", "Contextual token loses nothing to last token with examples"),
            *("Causal2Vec, Table 1 and Figure 6", base),
            lambda: causal2vec.last_token(with_examples(), "last-token-with-examples"),
            *(0.02, TASK_NAMES),
            costs_nothing=True,
            causes=(LONGER, DEEPER),
        ),
    )
