"""XTREME-R's tasks of Nomic Embed v2 (section 5.2, Table 4), learnt in English alone.

Data sets, lengths, epochs and rates are those of the pipeline that the paper used,
github.com/izhx/nlu-evals. Some of them are not XTREME-R's own: LAReQA finds whole contexts of
XQuAD-R, not sentences; Tatoeba and LAReQA are read by the first token of a model that learnt SQuAD
as retrieval; XQuAD has Romanian and not Hindi. Mewsli-X is not here: its test mentions have no
Parquet copy on the hub, only JSONL of one contributor (izhx/mewsli-x), which is not read.
"""

from rayembed_papers.backbone.settings import FinetuneProtocol
from rayembed_papers.backbone.tasks import Finetuning, Rows, ScoredRows, Task

BENCHMARK = "xtreme-r"

LEFT_OUT = {
    "Mewsli-X": "its test mentions have no Parquet copy on the hub",
}
"""Tasks of Table 4 that cannot be had, and why."""

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
"""transformers' defaults, of which most tasks change something."""


def _protocol(**changes: object) -> FinetuneProtocol:
    return FinetuneProtocol.model_validate({**_PLAIN.model_dump(), **changes})


def _names(text: str) -> list[str]:
    return text.split()


_NLI_COLUMNS = ("premise", "hypothesis", "label")
_QA_COLUMNS = ("question", "context", "answers")
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


def _tydiqa(split: str, language: str) -> Rows:
    return Rows(
        "google-research-datasets/tydiqa",
        f"secondary_task/{split}/*.parquet",
        _QA_COLUMNS,
        where=("id", f"{_TYDIQA[language]}-"),
    )


def _udpos(language: str, split: str) -> Rows:
    return Rows("izhx/xtreme-r-udpos", f"{language}/{split}*", ("tokens", "pos_tags"), "main")


def _copa(path: str, repository: str) -> Rows:
    return Rows(
        repository, f"{path}/*.parquet", ("premise", "question", "choice1", "choice2", "label")
    )


def _siqa(split: str) -> Rows:
    columns = ("context", "question", "answerA", "answerB", "answerC", "label")
    return Rows("allenai/social_i_qa", f"default/{split}/*.parquet", columns)


def _squad(columns: tuple[str, ...]) -> Rows:
    return Rows("rajpurkar/squad", "plain_text/train/*.parquet", columns)


FINETUNINGS = (
    Finetuning(
        name="XNLI",
        kind="classes",
        train=Rows("nyu-mll/glue", "mnli/train/*.parquet", _NLI_COLUMNS),
        protocol=_protocol(warmup_share=0.06),
        scored=tuple(
            ScoredRows("XNLI", lang, Rows("facebook/xnli", f"{lang}/test/*.parquet", _NLI_COLUMNS))
            for lang in _XNLI
        ),
        labels=("entailment", "neutral", "contradiction"),
    ),
    Finetuning(
        name="SIQa",
        kind="choices",
        train=_siqa("train"),
        protocol=_protocol(epochs=5),
        scored=(ScoredRows("SIQa", "validation", _siqa("validation")),),
        labels=("A", "B", "C"),
        first_label=1,
    ),
    Finetuning(
        name="COPA",
        kind="choices",
        train=_copa("copa/train", "aps/super_glue"),
        protocol=_protocol(epochs=5),
        scored=tuple(
            ScoredRows("XCOPA", lang, _copa(f"{lang}/test", "cambridgeltl/xcopa"))
            for lang in _XCOPA
        ),
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
        train=Rows("unimelb-nlp/wikiann", "en/train/*.parquet", ("tokens", "ner_tags")),
        protocol=_protocol(epochs=10),
        scored=tuple(
            ScoredRows(
                "WikiANN",
                lang,
                Rows("unimelb-nlp/wikiann", f"{lang}/test/*.parquet", ("tokens", "ner_tags")),
            )
            for lang in _WIKIANN
        ),
        labels=NER,
    ),
    Finetuning(
        name="SQuAD",
        kind="spans",
        train=_squad(_QA_COLUMNS),
        protocol=_protocol(**_QA),
        scored=(
            *(
                ScoredRows(
                    "XQuAD",
                    lang,
                    Rows("google/xquad", f"xquad.{lang}/validation/*.parquet", _QA_COLUMNS),
                )
                for lang in _XQUAD
            ),
            *(
                ScoredRows(
                    "MLQA",
                    lang,
                    Rows("google/xtreme", f"MLQA.{lang}.{lang}/test/*.parquet", _QA_COLUMNS),
                )
                for lang in _MLQA
            ),
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
        train=_squad(("question", "context")),
        protocol=_protocol(batch_sizes=(16,), max_length=256),
        scored=(
            *(
                ScoredRows(
                    "LAReQA",
                    lang,
                    Rows(
                        "google-research-datasets/xquad_r",
                        f"{lang}/validation/*.parquet",
                        ("question", "context"),
                    ),
                )
                for lang in _LAREQA
            ),
            *(
                ScoredRows(
                    "Tatoeba",
                    lang,
                    Rows(
                        "mteb/tatoeba-bitext-mining",
                        f"{lang}-eng/test/*.parquet",
                        ("sentence1", "sentence2"),
                    ),
                )
                for lang in _TATOEBA
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
"""Models that only others start from have a score, too: it chooses the best of several."""
