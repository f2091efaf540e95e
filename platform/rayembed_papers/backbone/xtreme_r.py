"""XTREME-R's tasks of Nomic Embed v2 (section 5.2, Table 4), trained on English data only.

Data sets, lengths, epochs and rates are those of the pipeline that the paper used,
github.com/izhx/nlu-evals. Some of them are not XTREME-R's own: LAReQA finds whole contexts of
XQuAD-R, not sentences; Tatoeba and LAReQA are read by the first token of a model that learnt SQuAD
as retrieval; XQuAD has Romanian and not Hindi. Mewsli-X is not here: its test mentions have no
Parquet copy on the hub, only JSONL of one contributor (izhx/mewsli-x), which is not read.
"""

from collections.abc import Sequence

from rayembed_papers.backbone.settings import FinetuneProtocol
from rayembed_papers.backbone.tasks import Finetuning, ScoredRows, Task, TaskRows

BENCHMARK = "xtreme-r"

LEFT_OUT = {
    "Mewsli-X": "its test mentions have no Parquet copy on the hub",
}
"""Tasks of Table 4 whose data are not available, with the reason."""

_PLAIN = FinetuneProtocol(
    epochs=3,
    learning_rates=(2e-5,),
    batch_sizes=(32,),
    seeds=(42,),
    max_length=128,
    warmup_share=0.0,
    max_grad_norm=1.0,
    weight_decay=0.0,
    adam_betas=(0.9, 0.999),
    adam_epsilon=1e-8,
)
"""Protocol with transformers' defaults; most tasks change some of them."""


def _protocol(**changes: object) -> FinetuneProtocol:
    return FinetuneProtocol.model_validate({**_PLAIN.model_dump(), **changes})


def _names(text: str) -> list[str]:
    return text.split()


_NLI_COLUMNS = ("premise", "hypothesis", "label")
_QA_COLUMNS = ("question", "context", "answers")
_SIQA_COLUMNS = ("context", "question", "answerA", "answerB", "answerC", "label")
_COPA_COLUMNS = ("premise", "question", "choice1", "choice2", "label")
_NER_COLUMNS = ("tokens", "ner_tags")
_QA = {"learning_rates": (3e-5,), "weight_decay": 1e-4, "max_length": 384}

_XNLI = _names("ar bg de el en es fr hi ru sw th tr ur vi zh")
_XCOPA = _names("et ht id it qu sw ta th tr vi zh")
_UDPOS = _names(
    "af ar bg de el en es et eu fa fi fr he hi hu id it ja kk ko lt mr nl pl pt ro ru ta te th tl "
    "tr uk ur vi wo yo zh"
)
_WIKIANN = _names(
    "ar he vi id jv ms tl eu ml ta te af nl en de el bn hi mr ur fa fr it pt es bg ru ja ka ko th "
    "sw yo my zh kk tr et fi hu qu pl uk az lt pa gu ro"
)
_XQUAD = _names("ar de el en es ru th tr vi zh ro")
_MLQA = _names("ar de en es hi vi zh")
_TYDIQA = {
    "en": "english", "ar": "arabic", "bn": "bengali", "fi": "finnish", "id": "indonesian",
    "ko": "korean", "ru": "russian", "sw": "swahili", "te": "telugu",
}  # fmt: skip
_LAREQA = _names("ar de el en es hi ru th tr vi zh")
_TATOEBA = _names(
    "ara heb vie ind jav tgl eus mal tam tel afr nld deu ell ben hin mar urd fra ita por spa bul "
    "rus jpn kat kor tha swh cmn kaz tur est fin hun pes aze lit pol ukr ron"
)

UPOS = _names("ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X")
"""Universal parts of speech, by name in the data."""

NER = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
"""WikiANN's tags, by number in the data."""


def _udpos(language: str, split: str) -> TaskRows:
    return TaskRows("izhx/xtreme-r-udpos", f"{language}/{split}*", ("tokens", "pos_tags"), "main")


def _tydiqa(split: str, language: str) -> TaskRows:
    return TaskRows(
        "google-research-datasets/tydiqa",
        f"secondary_task/{split}/*.parquet",
        _QA_COLUMNS,
        where=("id", f"{_TYDIQA[language]}-"),
    )


def _each(
    task: str, languages: Sequence[str], repository: str, path: str, columns: tuple[str, ...]
) -> tuple[ScoredRows, ...]:
    """Make the rows of each language by putting its code into the braces of the path."""
    return tuple(
        ScoredRows(task, code, TaskRows(repository, f"{path.format(code)}/*.parquet", columns))
        for code in languages
    )


FINETUNINGS = (
    Finetuning(
        name="XNLI",
        kind="classes",
        train=TaskRows("nyu-mll/glue", "mnli/train/*.parquet", _NLI_COLUMNS),
        protocol=_protocol(warmup_share=0.06),
        scored=_each("XNLI", _XNLI, "facebook/xnli", "{}/test", _NLI_COLUMNS),
        labels=("entailment", "neutral", "contradiction"),
    ),
    Finetuning(
        name="SIQa",
        kind="choices",
        train=TaskRows("allenai/social_i_qa", "default/train/*.parquet", _SIQA_COLUMNS),
        protocol=_protocol(epochs=5),
        scored=_each("SIQa", ("validation",), "allenai/social_i_qa", "default/{}", _SIQA_COLUMNS),
        labels=("A", "B", "C"),
        first_label=1,
    ),
    Finetuning(
        name="COPA",
        kind="choices",
        train=TaskRows("aps/super_glue", "copa/train/*.parquet", _COPA_COLUMNS),
        protocol=_protocol(epochs=5),
        scored=_each("XCOPA", _XCOPA, "cambridgeltl/xcopa", "{}/test", _COPA_COLUMNS),
        labels=("first", "second"),
        start="SIQa",
        template="{premise} What was the {question}?",
    ),
    Finetuning(
        name="UD-POS",
        kind="tags",
        train=_udpos("en", "train"),
        protocol=_protocol(epochs=10),
        scored=tuple(ScoredRows("UD-POS", lang, _udpos(lang, "test")) for lang in _UDPOS),
        labels=tuple(UPOS),
    ),
    Finetuning(
        name="WikiANN",
        kind="tags",
        train=TaskRows("unimelb-nlp/wikiann", "en/train/*.parquet", _NER_COLUMNS),
        protocol=_protocol(epochs=10),
        scored=_each("WikiANN", _WIKIANN, "unimelb-nlp/wikiann", "{}/test", _NER_COLUMNS),
        labels=NER,
    ),
    Finetuning(
        name="SQuAD",
        kind="spans",
        train=TaskRows("rajpurkar/squad", "plain_text/train/*.parquet", _QA_COLUMNS),
        protocol=_protocol(**_QA),
        scored=(
            *_each("XQuAD", _XQUAD, "google/xquad", "xquad.{}/validation", _QA_COLUMNS),
            *_each("MLQA", _MLQA, "google/xtreme", "MLQA.{0}.{0}/test", _QA_COLUMNS),
        ),
    ),
    Finetuning(
        name="TyDiQA-GoldP",
        kind="spans",
        train=_tydiqa("train", "en"),
        protocol=_protocol(**_QA),
        scored=tuple(
            ScoredRows("TyDiQA-GoldP", lang, _tydiqa("validation", lang)) for lang in _TYDIQA
        ),
    ),
    Finetuning(
        name="SQuAD-retrieval",
        kind="retrieval",
        train=TaskRows("rajpurkar/squad", "plain_text/train/*.parquet", ("question", "context")),
        protocol=_protocol(batch_sizes=(16,), max_length=256),
        scored=(
            *_each(
                "LAReQA",
                _LAREQA,
                "google-research-datasets/xquad_r",
                "{}/validation",
                ("question", "context"),
            ),
            *_each(
                "Tatoeba",
                _TATOEBA,
                "mteb/tatoeba-bitext-mining",
                "{}-eng/test",
                ("sentence1", "sentence2"),
            ),
        ),
    ),
)

TASKS = (
    Task("XNLI", BENCHMARK, "XNLI", "accuracy"),
    Task("XCOPA", BENCHMARK, "COPA", "accuracy"),
    Task("UD-POS", BENCHMARK, "UD-POS", "f1"),
    Task("WikiANN", BENCHMARK, "WikiANN", "f1"),
    Task("XQuAD", BENCHMARK, "SQuAD", "f1"),
    Task("MLQA", BENCHMARK, "SQuAD", "f1"),
    Task("TyDiQA-GoldP", BENCHMARK, "TyDiQA-GoldP", "f1"),
    Task("LAReQA", BENCHMARK, "SQuAD-retrieval", "map_at_20"),
    Task("Tatoeba", BENCHMARK, "SQuAD-retrieval", "accuracy"),
)

STEPS_ON_THE_WAY = (Task("SIQa", "", "SIQa", "accuracy"),)
"""Intermediate models that others start from; their score selects the best of several trials."""
