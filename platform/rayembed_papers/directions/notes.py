"""What a reader of a claim's difference must know beside it: the paper's other figures and ours."""

from collections.abc import Mapping

NOTES: Mapping[str, str] = {
    "mask": "Table 3, whose models have mined negatives and examples of classes as these have; "
    "before them (Table 2) +0.85.",
    "latent-mean": "Before mined negatives and examples (Table 2) +0.35.",
    "latent-self": "Before mined negatives and examples (Table 2) +0.22.",
    "mean-eos": "Before mined negatives and examples (Table 2) +1.12. In retrieval alone the paper "
    "has the last token ahead by 0.32.",
    "in-batch": "The paper blames in-batch negatives of a query's own class, which the loss here "
    "leaves out; what is left of them are right negatives.",
    "positive-aware": "The paper prints mined negatives against none (Table 4, +1.10), not "
    "against the nearest.",
    "synthetic": "A small model's questions are a tenth of the first stage, in place of as many "
    "other pairs; no scored task asks questions.",
    "moe": "The mean of three batch sizes on BEIR (+0.12, +0.59, +0.15; on MIRACL +5.03, -0.24, "
    "+1.25). With 100 million pairs the paper saw experts behind, so a reversal agrees with it.",
    "moe-layers": "With batches of 8,192; with 2,048 the paper has -0.15, and here they are 32.",
    "upcycled": "Half of the MLPs begin as noise and have 90 steps to learn: a large difference is "
    "to be expected. The paper prints none.",
    "filter": "A step of the paper that it does not measure; the sample's pairs are clean.",
    "matryoshka": "The paper compares 256 with 768 dimensions of one model (Table 12, -3.23), not "
    "trainings; here the loss of 256 of 384 acts in the last 30 of 90 steps.",
    "cross-lingual": "The paper trains on no translations.",
    "clusters": "Clustered batches leave likely false negatives out, random ones do not; both have "
    "32 pairs, in the paper 512 against 16,384.",
    "context": "Six trained layers of all-MiniLM are added to two, and no output MLP, which the "
    "released models have.",
    "context-clusters": "Six trained layers of all-MiniLM are added to two, and no output MLP, "
    "which the released models have.",
    "clusters-context": "Clustered batches leave likely false negatives out, random ones do not.",
    "dropout": "The paper has it for corpora without context, and here texts are scored with it. "
    "It replaces one of 32 context vectors in one text of six, too few to show much.",
    "contextual-token": "all-MiniLM, a finished embedder, stands beside two layers of an LLM: a "
    "large difference is to be expected. So for the other claims of its encoder.",
    "tuned-encoder": "With Mistral-7B the paper has the frozen one ahead by 0.21.",
    "concat": "The paper has no row of the Contextual state alone.",
    "in-context": "Pairs and similarity have no examples here. Mistral-7B's difference; in "
    "retrieval alone +0.20.",
    "lengths": "bge-en-icl is the paper's other model; in retrieval alone it is ahead by 2.80.",
}
"""By the claims' keys."""
