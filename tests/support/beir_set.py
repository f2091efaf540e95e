"""A retrieval set in BEIR's layout, written from plain mappings."""

import json


def write_beir(folder, documents, queries, judged):
    """Write texts by id, and grades by query and document, as the split test."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        rows = [json.dumps({"_id": id_, "text": text}) for id_, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    lines = ["query-id\tcorpus-id\tscore"]
    lines += [f"{q}\t{d}\t{grade}" for q, found in judged.items() for d, grade in found.items()]
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder
