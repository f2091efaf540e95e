"""Find likely causes why one of two models scores lower on a query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache

from rayembed.data.languages import language_of, script_of
from rayembed.data.words import search_words, words
from rayembed.evaluation.query_results import QueryResult

CUT = "cut by the length limit"
EXACT_WORDS = "exact words that BM25 finds"
NEAR_COPY = "an unjudged near-duplicate ranks above"
FALSE_NEGATIVE = "a false negative in training"
LANGUAGE = "another language"
NONE = "no cause found"

REMEDIES: Mapping[str, str] = {
    CUT: "raise the length limit (see the finding on cut texts), or split long documents",
    EXACT_WORDS: "join BM25's ranking to the model's (hybrid search), or train on more such pairs",
    NEAR_COPY: "judge it as relevant, or remove near-duplicates from the corpus",
    FALSE_NEGATIVE: "repair the labels of the hard negatives, or mine with a stricter limit",
    LANGUAGE: "train on pairs in this language",
    NONE: "read both rankings; with several such queries, train on pairs like them",
}
"""Cause → what to do, in the order of the table."""

_GOOD_RANK = 3
"""Rank up to which BM25 counts as finding a document."""
_ALIKE = 0.9
"""Share of equal words, in order, from which two texts count as near-duplicates."""
_WORDS = 400
"""Words of a text that are compared."""
_SURE = 2
"""Frequent words that make the language of a query or a document known."""


@dataclass(frozen=True)
class LikelyCause:
    """A likely cause of a query's lower score, with the evidence."""

    kind: str
    """One of the keys of `REMEDIES`."""
    detail: str
    """What was seen, for readers."""


@dataclass(frozen=True)
class CutCounts:
    """Queries and documents of a task that exceed a model's length limit, with their token
    counts.
    """

    queries: Mapping[str, int] = field(default_factory=dict)
    """Id of each cut query → its tokens."""
    documents: Mapping[str, int] = field(default_factory=dict)
    """Id of each cut document → its tokens."""
    query_limit: int = 0
    document_limit: int = 0


@dataclass(frozen=True)
class Evidence:
    """Data about one query in which likely causes of its lower score are searched."""

    query: str
    text: str
    judged: Mapping[str, int]
    """Grades of the judged documents; those above 0 are relevant."""
    worse: QueryResult
    """Result with the lower score."""
    better: QueryResult
    texts: Mapping[str, str]
    """Texts of relevant and of ranked documents by id."""
    cut: CutCounts | None = None
    """Texts that the model with the lower score cuts; None: not known."""
    cut_by_other: CutCounts | None = None
    """Texts that the other model cuts."""
    lexical: QueryResult | None = None
    """BM25's result; None: not known."""
    trained_negatives: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Document → queries of training rows that have it as a hard negative."""
    usual: str = ""
    """Script or language of most queries of the task; empty: not known."""

    @property
    def relevant(self) -> tuple[str, ...]:
        """Ids of the relevant documents."""
        return tuple(document for document, grade in self.judged.items() if grade > 0)

    @property
    def lost(self) -> tuple[str, ...]:
        """Relevant documents that the worse result ranks lower than the better one; all relevant
        ones if none is lower.
        """
        found = tuple(d for d in self.relevant if _rank(self.worse, d) > _rank(self.better, d))
        return found or self.relevant


def causes_of(evidence: Evidence) -> list[LikelyCause]:
    """List the likely causes of the lower score, in the order of `REMEDIES`; only the kind `NONE`
    if no cause applies.
    """
    looked_for = (_cut, _exact_words, _near_copy, _false_negative, _language)
    found = [cause for look in looked_for if (cause := look(evidence)) is not None]
    return found or [LikelyCause(NONE, "")]


def _rank(result: QueryResult, document: str) -> int:
    return result.rank_of(document) or len(result.best) + 1


def _cut(evidence: Evidence) -> LikelyCause | None:
    cut, other = evidence.cut, evidence.cut_by_other or CutCounts()
    if cut is None:
        return None
    found, both = [], True
    if evidence.query in cut.queries:
        found.append(f"{cut.query_limit} of {cut.queries[evidence.query]:,} tokens of the query")
        both &= evidence.query in other.queries
    for document in evidence.lost:
        if document in cut.documents:
            read = f"{cut.document_limit} of {cut.documents[document]:,} tokens"
            found.append(f"{read} of the relevant document {document}")
            both &= document in other.documents
            break
    if not found:
        return None
    return LikelyCause(CUT, f"{'both models read' if both else 'it reads'} {' and '.join(found)}")


def _exact_words(evidence: Evidence) -> LikelyCause | None:
    if evidence.lexical is None:
        return None
    for document in evidence.lost:
        lexical, own = evidence.lexical.rank_of(document), evidence.worse.rank_of(document)
        if lexical is not None and lexical <= _GOOD_RANK and (own is None or own > _GOOD_RANK):
            answer = {*search_words(evidence.texts.get(document, ""))}
            common = [w for w in search_words(evidence.text) if w in answer]
            shown = ", ".join(dict.fromkeys(sorted(common, key=len, reverse=True)[:3]))
            at = "not among the first ten" if own is None else f"at rank {own}"
            return LikelyCause(
                EXACT_WORDS,
                f"BM25 has {document} at rank {lexical}, it {at}"
                + (f"; common words: {shown}" if shown else ""),
            )
    return None


def _near_copy(evidence: Evidence) -> LikelyCause | None:
    for document in evidence.lost:
        above = evidence.worse.best[: _rank(evidence.worse, document) - 1]
        for rank, other in enumerate(above, 1):
            # Judged documents, relevant or not, were read by somebody.
            if other not in evidence.judged and other in evidence.texts:
                alike = _alike(evidence.texts[other], evidence.texts.get(document, ""))
                if alike >= _ALIKE:
                    return LikelyCause(
                        NEAR_COPY,
                        f"{other} at rank {rank} has {alike:.0%} of the words of {document}",
                    )
    return None


def _alike(one: str, other: str) -> float:
    """Share of words that two texts have in common in the same order, from 0 to 1."""
    first, second = _words_of(one), _words_of(other)
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    if matcher.real_quick_ratio() < _ALIKE or matcher.quick_ratio() < _ALIKE:
        return 0.0
    return matcher.ratio()


@lru_cache(maxsize=4096)
def _words_of(text: str) -> tuple[str, ...]:
    return tuple(words(text)[:_WORDS])


def _false_negative(evidence: Evidence) -> LikelyCause | None:
    for document in evidence.lost:
        queries = evidence.trained_negatives.get(document, ())
        if queries:
            own = {*words(evidence.text)}
            nearest = max(queries, key=lambda query: len(own & {*words(query)}))
            times = "a training row has" if len(queries) == 1 else f"{len(queries)} rows have"
            return LikelyCause(
                FALSE_NEGATIVE, f"{times} {document} as a hard negative, as for “{nearest[:120]}”"
            )
    return None


def _language(evidence: Evidence) -> LikelyCause | None:
    own = language(evidence.text)
    if not own:
        return None
    for document in evidence.lost:
        other = language(evidence.texts.get(document, ""))
        if _differ(own, other):
            return LikelyCause(
                LANGUAGE, f"the query is {own}, the relevant document {document} {other}"
            )
    if _differ(own, evidence.usual):
        return LikelyCause(
            LANGUAGE, f"the query is {own}, most queries of the task {evidence.usual}"
        )
    return None


def language(*texts: str) -> str:
    """Detect the language of texts by frequent words (`fra-Latn`), otherwise their script
    (`latin`); empty if unknown.
    """
    return language_of(texts, _SURE) or script_of(" ".join(texts))


def _differ(one: str, other: str) -> bool:
    """Whether two languages or scripts certainly differ; `latin` may be any language in that
    script.
    """
    if not one or not other:
        return False
    scripts = [_script(name) for name in (one, other)]
    return scripts[0] != scripts[1] or ("-" in one and "-" in other and one != other)


def _script(name: str) -> str:
    """Return the script of a result of `language`; all languages that it detects use the Latin
    script.
    """
    return "latin" if "-" in name else name
