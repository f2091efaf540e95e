"""Small repositories in the layouts of the real ones that the catalogue names, with made-up rows.

Beside the files that an entry reads stand others of the real repository that it must leave alone:
other splits, other languages, evaluation judgements, cards.
"""

import gzip
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[Mapping[str, Any]]


def bge_rows(name: str, count: int = 2) -> Rows:
    """Rows of BGE's repositories: lists of texts, and what nobody asks for."""
    return [
        {
            "query": f"{name} question {number}",
            "pos": [f"{name} answer {number}", f"{name} other answer {number}"],
            "neg": [f"{name} wrong {number}", f"{name} {number} wrong"],
            "category": "retrieval",
            "type": "s2p",
            "prompt": "Given a question, retrieve passages",
            "pos_scores": [0.9, 0.8],
            "neg_scores": [0.2, 0.1],
        }
        for number in range(count)
    ]


_FILES: dict[str, dict[str, dict[str, Rows]]] = {
    "cfli/bge-full-data": {
        "78f5c99b534a52824ab26bd24edda592eaed4c7a": {
            "data/fever-00000-of-00002.parquet": bge_rows("fever"),
            "data/fever-00001-of-00002.parquet": bge_rows("more fever"),
            "data/reddit_clustering-00000-of-00001.parquet": bge_rows("reddit"),
            "data/reddit_clusteringP2P-00000-of-00001.parquet": bge_rows("reddit p2p"),
        }
    },
    "cfli/bge-e5data": {
        "7a949e8f7db86ef52ce4b2d65cfde1a633f4ca75": {
            "data/miracl_ru-00000-of-00002.parquet": bge_rows("miracl ru"),
            "data/miracl_sw-00000-of-00001.parquet": bge_rows("miracl sw"),
            "data/mr_tydi_english-00000-of-00001.parquet": bge_rows("mr tydi"),
        }
    },
    "sentence-transformers/paq": {
        "0b8a1acd8be7bd6e713a8092564d9efb22a41ec5": {
            "pair/train-00000-of-00088.parquet": [{"query": "who", "answer": "she did"}],
            "pair/train-00087-of-00088.parquet": [{"query": "when", "answer": "in May"}],
        }
    },
    "sentence-transformers/natural-questions": {
        "main": {
            "pair/train-00000-of-00001.parquet": [{"query": "what is it", "answer": "a fox"}],
        }
    },
    "sentence-transformers/all-nli": {
        "65dd38867b600f42241d2066ba1a35fbd097fcfe": {
            "pair-class/train-00000-of-00001.parquet": [
                {"premise": "a fox runs", "hypothesis": "an animal moves", "label": 0},
                {"premise": "a fox runs", "hypothesis": "it is late", "label": 1},
                {"premise": "a fox runs", "hypothesis": "nothing moves", "label": 2},
                {"premise": "a dog sleeps", "hypothesis": "a dog is awake", "label": 2},
            ],
            "pair-class/dev-00000-of-00001.parquet": [
                {"premise": "held out", "hypothesis": "held", "label": 0}
            ],
            "triplet/train-00000-of-00001.parquet": [
                {"anchor": "a", "positive": "b", "negative": "c"}
            ],
        }
    },
    "mteb/scifact": {
        "d56462d0e63a25450459c4f213e49ffdb866f7f9": {
            "corpus.jsonl": [
                {"_id": "31715818", "title": "Cells", "text": "They divide."},
                {"_id": "13734012", "title": "", "text": "They do not."},
                {"_id": "22942787", "title": "Genes", "text": "They mutate."},
            ],
            "queries.jsonl": [
                {"_id": "0", "text": "Cells divide."},
                {"_id": "2", "text": "Genes mutate."},
            ],
            "qrels/train.jsonl": [
                {"query-id": "0", "corpus-id": "31715818", "score": 1.0},
                {"query-id": "0", "corpus-id": "13734012", "score": 1.0},
            ],
            "qrels/test.jsonl": [{"query-id": "2", "corpus-id": "22942787", "score": 1.0}],
        }
    },
    "BeIR/arguana-generated-queries": {
        "main": {
            "train.jsonl.gz": [
                {"_id": "x-1", "title": "Zoos", "text": "They teach.", "query": "what do zoos do"},
            ],
        }
    },
    "flax-sentence-embeddings/stackexchange_title_best_voted_answer_jsonl": {
        "refs/convert/parquet": {
            "chemistry/train/0000.parquet": [
                {"title_body": "Why is ice light?", "upvoted_answer": "It is an open lattice."}
            ],
            "physics/train/0000.parquet": [
                {"title_body": "Why is the sky blue?", "upvoted_answer": "Scattering."}
            ],
        },
    },
    "flax-sentence-embeddings/stackexchange_title_body_jsonl": {
        "main": {
            "chemistry.stackexchange.com.jsonl.gz": [
                {"texts": ["Ice on water", "It floats, but why?"], "tags": ["water"]}
            ],
            "physics.stackexchange.com.jsonl.gz": [
                {"texts": ["Sky at noon", "It is blue, but why?"], "tags": ["light"]}
            ],
        }
    },
    "mteb/sts12-sts": {
        "a0d554a64d88156834ff5ae9920b964011b16384": {
            "train.jsonl.gz": [
                {"sentence1": "A fox runs.", "sentence2": "A fox is running.", "score": 4.5},
                {"sentence1": "A fox runs.", "sentence2": "A dog sleeps.", "score": 1.0},
            ],
            "test.jsonl.gz": [{"sentence1": "held", "sentence2": "out", "score": 5.0}],
        }
    },
    "mteb/sts22-crosslingual-sts": {
        "refs/convert/parquet": {
            "en/train/0000.parquet": [
                {"sentence1": "News of a fox.", "sentence2": "A fox in the news.", "score": 4.0},
                {"sentence1": "News of a fox.", "sentence2": "Sport.", "score": 3.5},
            ],
            "en/test/0000.parquet": [{"sentence1": "held", "sentence2": "out", "score": 4.0}],
            "de/train/0000.parquet": [{"sentence1": "eins", "sentence2": "zwei", "score": 4.0}],
        }
    },
    "mteb/raw_biorxiv": {
        "main": {
            "train_0.jsonl.gz": [
                {"title": f"{kind} {n}", "abstract": f"On {kind} {n}.", "category": kind}
                for kind in ("ecology", "genetics", "zoology")
                for n in range(3)
            ],
        }
    },
    "SetFit/20_newsgroups": {
        "main": {
            "train.jsonl": [
                {"text": f"{name} post {n}", "label": number, "label_text": name}
                for number, name in enumerate(("rec.autos", "sci.space"))
                for n in range(3)
            ],
            "test.jsonl": [{"text": "held out", "label": 0, "label_text": "rec.autos"}],
        }
    },
    "mteb/emotion": {
        "4f58c6b202a23cf9a4da393831edf4f9183cad37": {
            "train.jsonl": [
                {"text": f"{name} {n}", "label": number, "label_text": name}
                for number, name in enumerate(("joy", "fear", "anger"))
                for n in range(2)
            ],
            "test.jsonl": [{"text": "held out", "label": 0, "label_text": "joy"}],
        }
    },
    "mteb/AmazonReviewsClassification": {
        "6b5d328eaae8ef408dd7d775040245cf86f92e9d": {
            f"{language}/{split}-00000-of-00001.parquet": [
                {"text": f"{language} {split} review {label}", "label": label}
                for label in range(5)
            ]
            for language in ("de", "en", "es", "fr", "ja", "zh")
            for split in ("train", "validation", "test")
        }
    },
    "sentence-transformers/reddit-title-body": {
        "main": {
            "reddit_title_text_2018.jsonl.gz": [
                {"title": f"{name} {n}", "body": f"Look at {name} {n}", "subreddit": name}
                for name in ("foxes", "trains")
                for n in range(2)
            ],
            "reddit_title_text_2019.jsonl.gz": [
                {"title": "another year", "body": "left alone", "subreddit": "foxes"}
            ],
        }
    },
    "nomic-ai/nomic-embed-unsupervised-data": {
        "dc9becf5b832f22f00007f14581bd73e2e6cf3aa": {
            "data/quora-00000-of-00001.parquet": [
                {
                    "query": "How do foxes live?",
                    "document": "How does a fox live?",
                    "dataset": "quora",
                    "shard": 0,
                }
            ],
            "data/squad-00000-of-00001.parquet": [
                {"query": "other", "document": "split", "dataset": "squad", "shard": 0}
            ],
        }
    },
    "allenai/c4": {
        "1ddc917116b730e1859edef32896ec5c16be51d0": {
            "multilingual/c4-cy.tfrecord-00000-of-00064.json.gz": [
                {"text": "Llwynogod\nMaent yn byw\nyn y coed.", "timestamp": "t", "url": "u"},
                {"text": "Llwynogod yn unig", "timestamp": "t", "url": "u"},
            ],
            "multilingual/c4-cy-validation.tfrecord-00000-of-00001.json.gz": [
                {"text": "held\nout", "timestamp": "t", "url": "u"}
            ],
            "multilingual/c4-cs.tfrecord-00000-of-00064.json.gz": [
                {"text": "Jin\u00fd\njazyk", "timestamp": "t", "url": "u"}
            ],
        }
    },
    "intfloat/multilingual_cc_news": {
        "refs/convert/parquet": {
            "cy/train/0000.parquet": [
                {"title": "Newyddion", "maintext": "Gwelwyd llwynog.", "language": "cy"},
                {"title": None, "maintext": "Heb deitl.", "language": "cy"},
            ],
            "cs/train/0000.parquet": [
                {"title": "Zpr\u00e1vy", "maintext": "Li\u0161ka.", "language": "cs"}
            ],
        }
    },
}  # fmt: skip


_CARDS = {
    "mteb/AmazonReviewsClassification": "---\nconfigs:\n"
    + "".join(
        f"- config_name: {language}\n  data_files:\n"
        + "".join(
            f"  - split: {split}\n    path: {language}/{split}-*\n"
            for split in ("train", "validation", "test")
        )
        for language in ("de", "en", "es", "fr", "ja", "zh")
    )
    + "---\n"
}
"""Beginnings of cards that say which files are which subset."""


def made_up_repositories() -> dict[str, dict[str, bytes]]:
    """Name → path → content of all repositories, with a card each."""
    return {
        name: {
            "README.md": f"{_CARDS.get(name, '')}# {name}\n".encode(),
            ".gitattributes": b"*.parquet filter=lfs\n",
            **{path: _encoded(path, rows) for path, rows in files.items()},
        }
        for name, revisions in _FILES.items()
        for files in revisions.values()
    }


def made_up_revisions() -> dict[str, tuple[str, ...]]:
    """Name → the only revision that a repository is served at, the one that the catalogue asks."""
    return {name: tuple(revisions) for name, revisions in _FILES.items()}


def _encoded(path: str, rows: Rows) -> bytes:
    """The file's content, in the format that its ending names."""
    if path.endswith(".parquet"):
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
        return buffer.getvalue()
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    return gzip.compress(lines, mtime=0) if path.endswith(".gz") else lines
