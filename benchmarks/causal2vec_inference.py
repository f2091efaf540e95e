"""What the Contextual token costs: Causal2Vec's encoding against the plain LLM's, in one run.

The same LLM reads the same Wikipedia texts as queries with an instruction: alone with last-token
pooling, with the encoder in a pass of its own, and with the encoder on the LLM's micro-batches.
Weights beside the pretrained ones are random, which costs the same. Best of several rounds in turn.
The paper (Figure 4, Mistral-7B beside E5-base): about equal to the plain LLM.

Run: python benchmarks/causal2vec_inference.py [--device cuda --backbone hf://… --encoder hf://…]
"""

import argparse
import time

import torch

from rayembed.assets.resolver import resolve_model
from rayembed.config.settings import parse
from rayembed.machine.hardware import auto_precision
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.loading.build import build_model
from rayembed.models.passes.encoding import encode
from rayembed.recipes.sample import MINILM, SMOLLM2, ScoreSizes
from rayembed_extras.wikipedia_sample.files import summaries

TASK = "Given a web search query, retrieve relevant passages that answer the query"


def build(args, **settings):
    config = {
        "backbone": {"path": args.backbone, "dtype": auto_precision(args.device).dtype},
        "encoder": {"path": args.encoder, "max_length": args.max_length},
        "lora": None,
        "query_max_length": args.max_length,
        "document_max_length": args.max_length,
        **settings,
    }
    folders = {"backbone": resolve_model(args.backbone), "encoder": resolve_model(args.encoder)}
    return build_model(parse(Causal2VecConfig, config), folders, seed=0).eval().to(args.device)


def sides(args):
    """Label and model of each side."""
    one_pass = build(args)
    one_pass.first_pass = lambda tokens, tokens_per_batch: tokens
    return {
        "plain LLM, last token": build(args, encoder=None, representation="eos"),
        "Causal2Vec, each part by itself": build(args),
        "Causal2Vec, both in one pass": one_pass,
    }


def seconds(model, texts):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    encode(model, texts, role="query", instruction=TASK)  # its vectors come back to the CPU
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default=SMOLLM2)
    parser.add_argument("--encoder", default=MINILM)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    articles = sorted(summaries(ScoreSizes(), "en"), key=lambda a: a.title)
    texts = [article.extract for article in articles[:: len(articles) // args.texts][: args.texts]]
    models, best = sides(args), {}
    for model in models.values():
        encode(model, texts[:4], role="query", instruction=TASK)
    for _ in range(args.rounds):
        for label, model in models.items():
            took = seconds(model, texts)
            best[label] = min(took, best.get(label, took))
    plain = next(iter(best.values()))
    print(f"{auto_precision(args.device)}\n")
    print("| | tokens a text | ms a text | against the plain LLM |\n|---|---|---|---|")
    for label, model in models.items():
        tokens = model.tokenizer(texts, "query", [TASK] * len(texts))
        mean = sum(len(one["input_ids"]) for one in tokens) / len(texts)
        ms = 1e3 * best[label] / len(texts)
        print(f"| {label} | {mean:.1f} | {ms:.1f} | {best[label] / plain:.2f} |")


if __name__ == "__main__":
    main()
