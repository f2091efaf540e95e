"""The plainest model of mteb over a spec: one process, no cache, everything in one call."""

from unittest.mock import patch

import mteb
import torch
from mteb.abstasks import AbsTaskClassification
from mteb.similarity_functions import cos_sim, dot_score, pairwise_cos_sim, pairwise_dot_score


class PlainSpecModel:
    """Implements mteb's `EncoderProtocol` over a spec."""

    def __init__(self, spec, device="cpu"):
        self.spec = spec
        self.mteb_model_meta = spec.meta
        self.embed = spec.load(device)
        self.seen = []

    def encode(self, inputs, *, task_metadata, hf_split, hf_subset, prompt_type=None, **_options):
        texts = [text for batch in inputs for text in batch["text"]]
        encode_spec = self.spec.encode_spec(task_metadata, prompt_type)
        self.seen.append((task_metadata.name, prompt_type, encode_spec))
        return self.embed(texts, encode_spec)

    def similarity(self, one, two):
        compare = cos_sim if self.spec.similarity == "cosine" else dot_score
        return compare(torch.as_tensor(one), torch.as_tensor(two))

    def similarity_pairwise(self, one, two):
        compare = pairwise_cos_sim if self.spec.similarity == "cosine" else pairwise_dot_score
        return compare(torch.as_tensor(one), torch.as_tensor(two))


def few_experiments():
    """Two classifiers instead of ten for each task, in this process: hundreds of fits otherwise."""
    return patch.object(AbsTaskClassification, "n_experiments", 2)


def check_with_mock_tasks(model):
    """Names of mteb's mock tasks that ran; a failed one is raised."""
    with few_experiments():
        results = mteb.mock_run(model).task_results
    ran = {name: result for name, result in results.items() if result is not None}
    failed = {n: r.exception for n, r in ran.items() if not isinstance(r, mteb.TaskResult)}
    assert not failed, failed
    return set(ran)
