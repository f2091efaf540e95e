"""Locations of the data sets of NV-Embed's Table 12.

The paper names its sources in sections 4.1 and 4.2 and cites them; where it leaves open which
public copy it took, the one is chosen whose size is nearest to the table's.
"""

from rayembed.data.sources.beir import BeirSource
from rayembed.data.sources.classes import ClassesSource
from rayembed.data.sources.mteb import MtebSource
from rayembed.data.sources.nli import NLISource
from rayembed.data.sources.pairs import PairsSource
from rayembed.data.sources.sts import STSSource
from rayembed.recipes.data_recipes import Home, Layout
from rayembed_papers.mixtures.datasets.entry import hub, hub_page


def beir(repository: str, revision: str, layout: Layout, licence: str, notes: str = "") -> Home:
    """Training judgements of a benchmark in BEIR's layout, from mteb's repositories."""
    return Home(
        BeirSource(
            path=hub(repository, "qrels/train.jsonl", revision),
            corpus=hub(repository, "corpus.jsonl", revision),
            queries=hub(repository, "queries.jsonl", revision),
        ),
        hub_page(repository),
        layout,
        licence,
        notes or "Files and columns as on the card of mteb/hotpotqa and the pages of mteb/scifact.",
    )


def mteb_classes(
    task: str,
    repository: str,
    licence: str,
    subset: str | None = None,
    names: dict[str, str] | None = None,
) -> Home:
    """Training split of a classification task, as the installed mteb reads it."""
    return Home(
        MtebSource(task=task, split="train", subset=subset, names=names or {}),
        hub_page(repository),
        "seen",
        licence,
        "Name, split and subset checked against the installed mteb, which pins the revision.",
    )


def preprints(archive: str, text: str, licence: str) -> Home:
    """Titles, or titles and abstracts, of one of mteb's three preprint archives."""
    repository = f"mteb/raw_{archive}"
    return Home(
        ClassesSource(path=hub(repository, "*.jsonl.gz"), text=text, label="category"),
        hub_page(repository),
        "seen" if archive == "biorxiv" else "alike",
        licence,
        "Files on the page of mteb/raw_biorxiv; columns in public code that reads all three.",
    )


def sts(
    repository: str, inside: str, revision: str, layout: Layout, notes: str, licence: str = ""
) -> Home:
    """Scored pairs of a training split."""
    return Home(
        STSSource(path=hub(repository, inside, revision)),
        hub_page(repository),
        layout,
        licence,
        notes,
    )


ALL_NLI = Home(
    NLISource(
        path=hub(
            "sentence-transformers/all-nli",
            "pair-class/train-*.parquet",
            "65dd38867b600f42241d2066ba1a35fbd097fcfe",
        ),
    ),
    hub_page("sentence-transformers/all-nli"),
    "seen",
    "CC BY-SA 4.0 (SNLI), several (MultiNLI)",
    "SNLI and MultiNLI. Folders and files on stored pages; columns (premise, hypothesis, label: 0 "
    "entailment, 1 neutral, 2 contradiction) remembered from the card.",
)

PAQ = Home(
    PairsSource(
        path=hub(
            "sentence-transformers/paq",
            "pair/train-*.parquet",
            "0b8a1acd8be7bd6e713a8092564d9efb22a41ec5",
        ),
        positive="answer",
    ),
    hub_page("sentence-transformers/paq"),
    "seen",
    notes="64 million pairs. Files on stored pages; columns (query, answer) remembered.",
)

ARGUANA = Home(
    PairsSource(
        path=hub("BeIR/arguana-generated-queries", "train.jsonl.gz"), positive="title+text"
    ),
    hub_page("BeIR/arguana-generated-queries"),
    "alike",
    "CC BY-SA 4.0",
    "Generated queries for ArguAna's corpus, which has no training split of its own. File as in "
    "BeIR/nfcorpus-generated-queries; columns (_id, title, text, query) remembered.",
)

STACKEXCHANGE = Home(
    PairsSource(
        path=hub(
            "flax-sentence-embeddings/stackexchange_title_best_voted_answer_jsonl",
            "*/train/*.parquet",
            "refs/convert/parquet",
        ),
        query="title_body",
        positive="upvoted_answer",
    ),
    hub_page("flax-sentence-embeddings/stackexchange_title_best_voted_answer_jsonl"),
    "seen",
    "CC BY-NC-SA 4.0",
    "A folder for each site in the branch that the hub converts; columns in public code.",
)

NATURAL_QUESTIONS = Home(
    PairsSource(
        path=hub("sentence-transformers/natural-questions", "pair/train-*.parquet"),
        positive="answer",
    ),
    hub_page("sentence-transformers/natural-questions"),
    "alike",
    notes="100,231 pairs, as many as the table says. Layout as of sentence-transformers/paq.",
)

NEWSGROUPS = Home(
    ClassesSource(path=hub("SetFit/20_newsgroups", "train.jsonl"), label="label_text"),
    hub_page("SetFit/20_newsgroups"),
    "seen",
    notes="Columns (text, label, label_text) and the split in public code; the file's name "
    "remembered.",
)


def reddit_titles_and_bodies() -> Home:
    """Reddit posts of one year by subreddit, more than the table's 50k."""
    return Home(
        ClassesSource(
            path=hub("sentence-transformers/reddit-title-body", "reddit_title_text_2018.jsonl.gz"),
            text="title+body",
            label="subreddit",
        ),
        hub_page("sentence-transformers/reddit-title-body"),
        "remembered",
        notes="The paper cites this repository; one year of it is enough. Columns (title, body, "
        "subreddit) and the names of files, one a year, remembered.",
    )


def own_classes(name: str, url: str, notes: str) -> Home:
    """Rows with `text` and `label` in the folder `name` below `data.root`."""
    return Home(ClassesSource(path=f"{name}/"), url, "own", notes=notes)
