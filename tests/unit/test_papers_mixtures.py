"""The catalogue of training data sets against the tables of the four papers, typed from them."""

import inspect
import re

import pytest

from rayembed.assets.hub import parse_hub_reference
from rayembed.config.data_run import DataRun
from rayembed.config.document import read_yaml
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.sources.beir import BeirSource
from rayembed.data.sources.classes import ClassesSource
from rayembed.data.sources.earlier import RecordsSource
from rayembed.data.sources.nli import NLISource
from rayembed.data.sources.pairs import PairsSource
from rayembed.data.sources.sts import STSSource
from rayembed.errors import ConfigError
from rayembed.pipeline.register.licences import data_licences
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed.recipes.data_recipes import (
    data_recipe_names,
    get_data_recipe,
    known_datasets,
)
from rayembed_papers.sources.mteb import MtebSource

NVEMBED = {
    # arXiv 2405.17428, Table 12, in its order; counts as printed. Rows with two instructions or
    # in two forms are several entries, which together have the count.
    "arguana": "16k",
    "nli-similar nli-entailed": "270k",
    "paq-passages paq-documents": "500k",
    "msmarco": "500k",
    "squad": "87k",
    "stackexchange": "80k",
    "natural-question": "100k",
    "hotpotqa": "170k",
    "fever": "140k",
    "fiqa2018": "5k",
    "bioasq": "2.4k",
    "hover": "17k",
    "nfcorpus": "3.6k",
    "miracl": "2k",
    "mr-tydi": "2k",
    "scifact": "0.9k",
    "sts12": "1.8k",
    "sts22": "0.3k",
    "stsbenchmark": "2.7k",
    "amazon-counterfactual-labels": "6k",
    "amazon-polarity-labels": "20k",
    "amazon-reviews-labels": "40k",
    "banking77-labels": "10k",
    "emotion-examples": "16k",
    "imdb-labels": "24k",
    "mtop-intent-examples": "15k",
    "mtop-domain-examples": "15k",
    "massive-intent-examples": "11k",
    "massive-scenario-examples": "11k",
    "toxic-conversations-labels": "50k",
    "tweet-sentiment-extraction-labels": "27k",
    "arxiv-p2p-examples": "50k",
    "arxiv-s2s-examples": "50k",
    "biorxiv-p2p-examples": "15k",
    "biorxiv-s2s-examples": "15k",
    "medrxiv-p2p-examples": "2.3k",
    "medrxiv-s2s-examples": "2.3k",
    "reddit-examples": "50k",
    "reddit-s2s-examples": "40k",
    "stackexchange-clustering-examples": "50k",
    "stackexchange-clustering-s2s-examples": "40k",
    "twenty-newsgroups-examples": "1.7k",
    "synthetic": "120k",  # section 4.3
}

TABLE_10 = """
en 234,553,344 be 589,824 my 147,456 es 210,010,112 ml 557,056 km 131,072 fr 172,769,280 kn 524,288
mg 131,072 de 169,426,944 mk 425,984 pa 131,072 it 104,251,392 ur 409,600 ru-Latn 131,072
pt 87,982,080 fy 393,216 sn 131,072 pl 63,209,472 fil 360,448 zh-Latn 131,072 nl 50,118,656
te 360,448 ha 98,304 tr 49,053,696 eu 344,064 he 98,304 ja 43,433,984 sw 327,680 hmn 98,304
vi 40,058,880 so 294,912 ht 98,304 ru 38,731,776 sd 262,144 ja-Latn 98,304 id 36,470,784 uz 262,144
su 98,304 ar 33,800,192 co 245,760 bg-Latn 65,536 cs 29,966,336 hr 245,760 gd 65,536 ro 24,772,608
gu 229,376 ny 65,536 sv 24,608,768 hi-Latn 229,376 ps 65,536 el 22,773,760 ceb 196,608 ku 49,152
uk 19,841,024 eo 196,608 sh 49,152 zh 18,661,376 jv 196,608 am 32,768 hu 18,448,384 la 196,608
ig 32,768 da 14,548,992 zu 196,608 lo 32,768 no 12,812,288 mn 180,224 mi 32,768 hi 12,713,984
si 180,224 nn 32,768 fi 12,697,600 el-Latn 163,840 sm 32,768 bg 12,042,240 ga 163,840 yi 32,768
ko 10,354,688 ky 163,840 st 16,384 sk 8,962,048 tg 163,840 tl 16,384 th 7,602,176 xh 16,384
iw 5,783,552 yo 16,384 ca 5,701,632 lt 5,242,880 fa 5,177,344 ms 4,325,376 sl 4,259,840 lv 3,211,264
mr 2,588,672 bn 2,457,600 sq 2,113,536 cy 2,048,000
"""
"""arXiv 2502.07972, by language."""

TABLE_11 = """
msmarco 485,120 stack 249,856 squad 87,552 hotpot 82,432 nq 57,856 fever 28,672 miracl-ru 4,608
miracl-id 3,840 miracl-ar 3,328 miracl-ja 3,328 miracl-te 3,328 miracl-fi 2,816 miracl-th 2,816
miracl-en 2,560 miracl-es 2,048 miracl-fa 2,048 miracl-sw 1,792 miracl-bn 1,536 miracl-zh 1,280
miracl-fr 1,024 miracl-hi 1,024 miracl-ko 768
"""

CDE_TABLE_5 = """
reddit-title-body 64,978,944 paq 52,953,088 amazon-reviews 38,682,624
s2orc-title-abstract 35438592 wikianswers 9,912,320 s2orc-citation-titles 7,585,792
s2orc-abstract-citation 7,503,872 s2orc-abstract-body 6,389,760 wikipedia 6,078,464
gooaq 1,245,184 codesearch 835,584 agnews 409,600 ccnews 344,064 npr 344,064 cnn 278,528
yahoo-title-answer 262,144 amazonqa 212,992 yahoo-title-question 196,608
sentence-compression 163,840 yahoo-qa 131,072 eli5 98,304 altlex 98,304 wikihow 81,920
simplewiki 81,920 stackexchange-duplicate-questions 65,536 stackexchange-title-body 65,536
stackexchange-body-body 65,536 quora 32,768 squad 16,384
"""

CAUSAL2VEC = {
    # arXiv 2507.23386, Appendix A.3 (ratio) and Table 8 (instruction).
    "eli5": (0.1, "highest voted answers on Reddit ELI5 forum"),
    "hotpotqa": (1, "Given a multi-hop question, retrieve documents that can help answer the"),
    "fever": (1, "Given a claim, retrieve documents that support or refute the claim"),
    "miracl": (1, "Given a question, retrieve Wikipedia passages that answer the question"),
    "msmarco-passage": (0.5, "web search query, retrieve relevant passages that answer the query"),
    "msmarco-document": (0.2, "web search query, retrieve relevant documents that answer the que"),
    "nq": (1, "Given a question, retrieve Wikipedia passages that answer the question"),
    "nli-entailed": (0.5, "retrieve a hypothesis that is entailed by the premise"),
    "nli-similar": (0.5, "Retrieve semantically similar text"),
    "squad": (1, "Retrieve Wikipedia passages that answer the question"),
    "triviaqa": (1, "Retrieve Wikipedia passages that answer the question"),
    "quora-equivalent": (0.05, "retrieve questions that are semantically equivalent to the given"),
    "quora-same-meaning": (0.05, "Find questions that have the same meaning as the input question"),
    "mr-tydi": (1, "Given a question, retrieve Wikipedia passages that answer the question"),
    "dureader": (1, "Given a Chinese search query, retrieve web passages that answer the"),
    "t2ranking": (0.5, "Given a Chinese search query, retrieve web passages that answer the"),
}


def printed(table: str) -> dict[str, int]:
    words = table.split()
    return {
        name: int(count.replace(",", ""))
        for name, count in zip(words[::2], words[1::2], strict=True)
    }


def of_recipe(name: str) -> dict[str, object]:
    return {dataset.name: dataset for dataset in get_data_recipe(name).data.datasets}


def entries_of(prefix: str) -> dict[str, object]:
    names = [name for name in known_datasets() if name.startswith(f"{prefix}/")]
    return {name.removeprefix(f"{prefix}/"): known_datasets()[name] for name in names}


def test_nvembed_has_the_rows_and_counts_of_its_table_12():
    entries = entries_of("nvembed")
    forms = {n for n in entries if n.endswith("-labels") and n not in NVEMBED}
    assert set(" ".join(NVEMBED).split()) == set(entries) - forms
    # The two forms of section 5.2.4: 5 classification and 11 clustering data sets.
    assert {n.replace("-labels", "-examples") for n in forms} < set(entries)
    assert len(forms) == 16
    for names, count in NVEMBED.items():
        samples = round(float(count.removesuffix("k")) * 1000)
        found = [entries[name] for name in names.split()]
        assert sum(entry.samples for entry in found) == samples, names
        assert all(entry.config.num_samples == entry.samples for entry in found)
    assert set(of_recipe("nvembed-data")) == set(entries) - forms
    v2 = {dataset.name: dataset for dataset in get_recipe("nvembed-v2").data.datasets}
    assert v2 == of_recipe("nvembed-data")


def test_nomic_pretraining_has_the_languages_of_table_10():
    table = printed(TABLE_10)
    assert len(table) == 98
    by_language: dict[str, set[int]] = {}
    corpora: dict[str, set[str]] = {}
    english = 0
    datasets = of_recipe("nomic-pretraining-data")
    for name in datasets:
        entry = known_datasets()[f"nomic/{name}"]
        if name.startswith(("mc4-", "cc-news-")):
            code = re.sub("^(mc4|cc-news)-", "", name)
            by_language.setdefault(code, set()).add(entry.samples)
            corpora.setdefault(code, set()).add(name.removesuffix(f"-{code}"))
            # It is the count after the filter, so it is no number to draw before it.
            assert entry.config.num_samples is None
        else:
            english += entry.samples
    assert english == table.pop("en")
    assert {code: {count} for code, count in table.items()} == by_language
    # Codes of old standards and of other scripts are mC4's, a few are of CC-News alone.
    for code in ("iw", "ru-Latn", "bg-Latn", "fil"):
        assert corpora[code] == {"mc4"}
    for code in ("he", "tl", "nn", "sh", "hr"):
        assert corpora[code] == {"cc-news"}
    assert corpora["de"] == {"mc4", "cc-news"}


def test_nomic_filters_all_but_english_which_comes_filtered():
    """Section 4.2."""
    for name, dataset in of_recipe("nomic-pretraining-data").items():
        web = name.startswith(("mc4-", "cc-news-"))
        assert (dataset.consistency is not None) == web
        if web:
            assert "multilingual-e5-small" in dataset.consistency.teacher
            assert (dataset.consistency.top_k, dataset.consistency.shard_rows) == (2, 1_000_000)
            assert dataset.consistency.query_prefix == "query: "
            assert dataset.query_instruction == "search_query: "
            assert dataset.document_instruction == "search_document: "
        assert dataset.mining is None


def test_nomic_finetuning_has_the_samples_of_table_11():
    table = printed(TABLE_11)
    assert sum(table.values()) == 1_029_632  # its last row
    found = of_recipe("nomic-finetuning-data")
    datasets = {name.removeprefix("finetuning-"): dataset for name, dataset in found.items()}
    assert {name: dataset.num_samples for name, dataset in datasets.items()} == table
    for name, dataset in datasets.items():
        mining = dataset.mining
        assert (mining.num_negatives, mining.rule.max_relative_score) == (10, 0.95), name
        assert "bge-m3" in mining.teacher
        assert mining.pool == ("corpus" if name == "stack" else "given")


def test_causal2vec_has_the_ratios_and_instructions_of_its_appendix():
    datasets = of_recipe("causal2vec-data")
    assert list(datasets) == list(CAUSAL2VEC)
    for name, (ratio, instruction) in CAUSAL2VEC.items():
        dataset = datasets[name]
        assert (dataset.sample_share or 1) == ratio, name
        assert dataset.num_samples is None
        assert instruction in dataset.query_instruction, name
        assert dataset.document_instruction == ""
        assert dataset.has_negatives


def test_cde_has_the_counts_of_table_5_in_clusters_of_512_by_gtr():
    table = printed(CDE_TABLE_5)
    assert len(table) == 29
    assert sum(table.values()) == 234_553_344  # its last row
    datasets = of_recipe("cde-unsupervised-data")
    assert {name: dataset.num_samples for name, dataset in datasets.items()} == table
    supervised = of_recipe("cde-supervised-data")
    assert all(dataset.has_negatives for dataset in supervised.values())
    for dataset in (*datasets.values(), *supervised.values()):
        clusters = dataset.clusters
        assert "gtr" in clusters.teacher
        assert (clusters.batch_pairs, clusters.pairs_per_cluster) == (512, 512)
        assert (clusters.iterations, clusters.restarts) == (100, 3)
        # Section 10.7: one of four prefixes before each text.
        allowed = {"search_query: ", "search_document: ", "clustering: ", "classification: "}
        assert {dataset.query_instruction, dataset.document_instruction} <= allowed
    assert supervised["bge-quora"].document_instruction == "search_query: "


@pytest.mark.parametrize("name", data_recipe_names())
def test_data_recipes_come_back_from_their_text(name):
    run = get_data_recipe(name)
    assert run.name == name
    assert parse(DataRun, read_yaml(run.to_yaml())) == run


def test_names():
    names = known_datasets()
    # Each data set of a recipe is an entry; 16 more are the other form of NV-Embed's classes.
    papers = [recipe for recipe in data_recipe_names() if recipe != "pairs"]
    assert len(names) == sum(len(of_recipe(recipe)) for recipe in papers) + 16
    assert not set(data_recipe_names()) & set(recipe_names())  # a job takes both
    with pytest.raises(ConfigError, match="did you mean 'cde-supervised-data'"):
        get_data_recipe("cde-supervized-data")


def test_every_entry_says_where_it_lives_and_how_that_is_known():
    kinds = set()
    for name, entry in known_datasets().items():
        source, home = entry.config.source, entry.home
        kinds.add(type(source))
        assert entry.paper.name in {"NV-Embed", "Nomic Embed v2", "Causal2Vec", "CDE"}
        assert re.match(r"arXiv 2\d{3}\.\d{5}, (Table \d|Appendix A|section \d)", entry.reference)
        assert entry.config.in_batch_negatives
        assert home.notes, name
        assert source == home.source or isinstance(source, ClassesSource | MtebSource)
        path = getattr(source, "path", None)
        if home.layout == "own":
            assert "://" not in path, name
            assert path.endswith("/")
        else:
            repository = home.url.removeprefix("https://huggingface.co/datasets/")
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository), name
            for file in filter(
                None, [path, *(getattr(source, n, "") for n in ("corpus", "queries"))]
            ):
                found = parse_hub_reference(file)
                assert (found.repo_type, found.repo_id) == ("dataset", repository), name
                assert re.fullmatch(r"main|refs/convert/parquet|[0-9a-f]{40}", found.revision)
                assert found.inside.endswith((".parquet", ".jsonl", ".jsonl.gz", ".json.gz"))
    assert kinds == {
        PairsSource, NLISource, STSSource, ClassesSource, BeirSource, MtebSource, RecordsSource
    }  # fmt: skip


SLIPS = {
    # Where the paper's words differ from mteb's: slips, but they are the paper's.
    "banking77-labels": "Given a online banking query, find the corresponding intents",
    "reddit-examples": "Identify the topic or theme of Reddit posts based on the titles and posts",
    "reddit-s2s-examples": "Identify the topic or theme of Reddit posts based on the titles",
    "stackexchange-clustering-examples": "Identify the topic or theme of StackExchange posts based "
    "on the given paragraphs",
    "stackexchange-clustering-s2s-examples": "Identify the topic or theme of StackExchange posts "
    "based on the titles",
}


def test_instructions_are_mtebs_where_the_paper_does_not_say_otherwise():
    """Both come from the same collection; what differs is listed, so that no typing error hides."""
    import mteb

    from rayembed_papers.mixtures.datasets.nvembed import table_rows

    by_name = {row.name: row for row in table_rows() if row.benchmark}
    compared = 0
    for name, entry in entries_of("nvembed").items():
        base = re.sub("-(labels|examples)$", "", name)
        if base not in by_name or name not in NVEMBED:
            continue
        prompt = mteb.get_task(by_name[base].benchmark).metadata.prompt
        assert prompt == SLIPS.get(name, entry.config.query_instruction), name
        compared += 1
    assert compared == 7 + 5 + 11


def test_tasks_of_mteb_have_the_training_split_and_the_subset_that_are_named():
    import mteb

    seen = set()
    for name, entry in known_datasets().items():
        if not isinstance(entry.config.source, MtebSource):
            continue
        source = entry.config.source
        task = mteb.get_task(source.task)
        metadata = task.metadata
        assert source.split not in metadata.eval_splits
        train = metadata.descriptive_stats[source.split]
        if source.subset is not None:
            train = train["hf_subset_descriptive_stats"][source.subset]
        else:
            assert metadata.hf_subsets == ["default"]
        # The paper draws no more than there are (24k of 25k of IMDB), but for Counterfactual's 6k.
        seen.add(source.task)
        if source.task != "AmazonCounterfactualClassification":
            assert train["num_samples"] >= entry.samples, name
        assert entry.home.url == f"https://huggingface.co/datasets/{metadata.dataset['path']}"
        licence = metadata.license.replace("not specified", "")
        assert re.sub(r"\W", "", entry.home.licence.lower()) == re.sub(r"\W", "", licence), name
    assert len(seen) == 12


def test_revisions_of_mtebs_repositories_are_those_that_mteb_evaluates_with():
    import mteb

    tasks = {
        "msmarco": "MSMARCO",
        "hotpotqa": "HotpotQA",
        "fever": "FEVER",
        "fiqa2018": "FiQA2018",
        "nfcorpus": "NFCorpus",
        "scifact": "SciFact",
        "sts12": "STS12",
        "stsbenchmark": "STSBenchmark",
    }
    entries = entries_of("nvembed")
    beir = {n for n, e in entries.items() if isinstance(e.config.source, BeirSource)}
    assert beir < set(tasks)
    for name, task in tasks.items():
        dataset = mteb.get_task(task).metadata.dataset
        start = f"hf://datasets/{dataset['path']}@{dataset['revision']}/"
        source = entries[name].config.source
        paths = [source.path, *(getattr(source, n, start) for n in ("corpus", "queries"))]
        assert all(path.startswith(start) for path in paths), name


def test_the_catalogue_is_settings_alone():
    """Every module of it can be read where neither torch, Ray nor mteb is installed."""
    from rayembed.recipes import data_recipes as catalogue
    from rayembed_papers.mixtures.datasets import nomic, nvembed

    for module in (catalogue, nomic, nvembed):
        assert not re.search(r"import (torch|ray|mteb)\b", inspect.getsource(module))


def test_every_home_in_the_table_is_that_of_a_data_set():
    from rayembed_papers.mixtures.datasets import homes
    from rayembed_papers.printed import rows_of

    used = {entry.home.url for entry in known_datasets().values()}
    rows = rows_of("rayembed_papers.mixtures.datasets", "homes")
    assert len({row["name"] for row in rows}) == len(rows) > 40
    split = {"full": "full/nq", "e5": "e5/eli5", "nomic": "nomic/paq"}
    languages = {"mc4": "mc4/de", "cc-news": "cc-news/de"}
    for row in rows:
        home = homes.home_named({**split, **languages}.get(row["name"], row["name"]))
        assert home.url in used, row["name"]
        assert home.notes, row["name"]


def test_a_run_on_public_data_is_scored_on_nanobeir():
    run = get_recipe("nvembed-v2-public")
    assert run.evaluation.benchmarks == run.scores.benchmarks == ("NanoBEIR",)


def test_the_licence_of_a_data_set_comes_from_the_catalogue():
    entry = known_datasets()["nvembed/fever"]
    values = get_recipe("biencoder").model_dump(mode="json") | {"evaluation": {}}
    fever = entry.config.model_dump(mode="json") | {"name": "pairs", "mining": None}
    values["data"]["datasets"][0] = fever
    assert data_licences(parse(Run, values)) == {"pairs": entry.home.licence}
    assert entry.home.licence
