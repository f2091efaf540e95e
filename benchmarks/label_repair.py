"""Planted false negatives: how many label repair finds, and what they do to quality.

The articles of a set of `backbone.py` are cut in halves, one of which is the positive. Of a third
of the rows the other half, which the query was as much taken from, stands among the negatives; the
others are drawn. The judge is the cross-encoder of `backbone.py`, trained on sentences of other
articles in English (of the descriptions' articles it has seen 45 %); French and Spanish it meets as
they come. In the arms `by endpoint` a server on the loopback answers as a language model that knows
what was planted: what the best judge gives.

    python benchmarks/label_repair.py --seeds 0 1 2 --sets en-sentence fr-sentence
"""

import json
import random
import re
import tempfile
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from backbone import (
    HELD_OUT,
    JUDGE_LENGTH,
    NEGATIVES,
    cross_encoder,
    measured,
    own_score,
    pairs,
    parsed,
    table,
    trained,
)

ARMS = {
    "none planted": None,
    "planted": None,
    "dropped": "drop",
    "relabelled": "relabel",
    "dropped by endpoint": "drop",
    "relabelled by endpoint": "relabel",
}
"""Arm → action of label repair; None: there is none."""


def halves(name, share=1 / 3):
    """Rows of a set with half of each article, and the false negatives of so many of them."""
    from rayembed.data.words import split_sentences

    draw = random.Random(0)
    cut = []
    for query, article in pairs(name, 4000):
        sentences = split_sentences(article)
        middle = len(sentences) // 2
        if middle:
            cut.append((query, " ".join(sentences[:middle]), " ".join(sentences[middle:])))
    rows, false = [], set()
    for query, positive, other in cut[: HELD_OUT + 2000]:
        negatives = [draw.choice(cut)[1] for _ in range(NEGATIVES)]
        if draw.random() < share:
            negatives[0] = other
            false.add((query, other))
        rows.append((query, positive, negatives))
    return rows, false


@contextmanager
def endpoint(false):
    """Address of a chat endpoint that names the planted ones among the candidates."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"]
            query = re.search(r"\nQuery:\n(.*)\n\nKnown to answer it:", prompt)[1]
            candidates = re.findall(r"^\[(\d+)\] (.*)$", prompt.split("\nCandidates:\n")[1], re.M)
            named = [int(number) for number, text in candidates if (query, text) in false]
            message = {"content": json.dumps({"relevant": named})}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            content = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def arm_settings(name, arm, reranker, address):
    """Arguments of `trained`."""
    found = {
        "given": halves(name, share=0 if arm == "none planted" else 1 / 3)[0],
        "data.datasets.pairs.mining": None,
        "data.datasets.pairs.source.max_rejected_share": 0.1,
    }
    if ARMS[arm] is not None:
        judge = {
            "kind": "cross_encoder",
            "model": reranker,
            "max_length": JUDGE_LENGTH,
            "margin": None,
            "min_score": 0.4,
        }
        if arm.endswith("by endpoint"):
            llm = {"url": address, "model": "knows what was planted"}
            judge = {"kind": "endpoint", "llm": llm, "max_words": 10_000}
        found["data.datasets.pairs.repair"] = {"judge": judge, "action": ARMS[arm]}
    return found


def shares(name, folders):
    """How many of the planted negatives and of the others were dropped from training rows."""
    from rayembed.data.engine.parts import read_records
    from rayembed.data.words import normalised_hash

    paths = [path for folder in folders for path in folder.glob("**/*.parquet")]
    records = {record.query: record for path in paths for record in read_records(str(path))}
    rows, false = halves(name)
    counts = {"planted": [0, 0], "others": [0, 0]}
    for query, _, negatives in rows:
        for text in negatives if query in records else ():
            count = counts["planted" if (query, text) in false else "others"]
            count[0] += normalised_hash(text) in records[query].false_negatives
            count[1] += 1
    return "; ".join(f"{hit} of {all_} {kind}" for kind, (hit, all_) in counts.items())


def main():
    given = parsed(__doc__, ARMS)
    asked = {"dropped", "relabelled"} & set(given.arms)
    reranker = cross_encoder() if asked else None
    found = {name: {} for name in given.sets}
    for name in given.sets:
        stub = endpoint(halves(name)[1])
        with tempfile.TemporaryDirectory() as output, stub as address:
            for seed in given.seeds:
                for arm in given.arms:
                    repaired = Path(output) / "data" / "repaired"
                    before = set(repaired.glob("*"))
                    settings = arm_settings(name, arm, reranker, address)
                    run = partial(trained, name, seed, output, **settings)
                    scores = measured(given.results, name, arm, seed, run)
                    found[name].setdefault(arm, []).append(own_score(scores))
                    made = set(repaired.glob("*")) - before
                    if arm.startswith("dropped") and made:
                        told = shares(name, made)
                        print(f"{name}, {arm}, of negatives: {told}", flush=True)
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
