"""Rows of the tables of NV-Embed and Causal2Vec, at both sizes, and the published scores."""

from collections.abc import Mapping

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import changed
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.recipes.causal2vec import quickstart as causal2vec_quickstart
from rayembed.recipes.nvembed import quickstart as nvembed_quickstart
from rayembed_papers.ablations import last_token, reversed_stages, single_stage
from rayembed_papers.mixtures import causal2vec, nvembed

PrintedFigures = Mapping[str, Mapping[str, float]]
"""Row → column → score in percent."""

NVEMBED_2 = {
    "model.pooling.kind": ("eos", "mean", "latent_attention", "self_attention"),
    "model.mask": ("bidirectional", "causal"),
}
CONTEXTUAL_TOKENS = {"model.num_contextual_tokens": ("1", "2", "4", "8")}
REPRESENTATIONS = {"model.representation": ("concat", "concat_encoder", "average", "eos")}

_SLLAMA, _MISTRAL = "S-LLaMA-1.3B", "Mistral-7B"


def _both(small: float, large: float) -> dict[str, float]:
    return {_SLLAMA: small, _MISTRAL: large}


CAUSAL2VEC_2: PrintedFigures = {
    "neither": _both(61.81, 64.84),
    "Contextual token": _both(62.19, 65.44),
    "Contextual token and concatenation": _both(62.83, 65.85),
}
CAUSAL2VEC_5: PrintedFigures = {
    "model.num_contextual_tokens=1": _both(62.83, 65.85),
    "model.num_contextual_tokens=2": _both(62.77, 65.76),
    "model.num_contextual_tokens=4": _both(62.51, 65.72),
    "model.num_contextual_tokens=8": _both(62.67, 65.68),
}
CAUSAL2VEC_12: PrintedFigures = {
    "model.representation=concat": _both(62.83, 65.85),
    "model.representation=concat_encoder": _both(62.44, 65.59),
    "model.representation=average": _both(62.67, 65.55),
    "model.representation=eos": _both(62.19, 65.44),
}


def by_backbone(printed: PrintedFigures) -> PrintedFigures:
    """List the scores of both LLMs as separate rows, as the sweep at published size has them."""
    return {
        f"{backbone}, {row}": {"MTEB-MINI (30)": figures[backbone]}
        for backbone in (_SLLAMA, _MISTRAL)
        for row, figures in printed.items()
    }


def printed_nvembed_2() -> PrintedFigures:
    """Published scores of NV-Embed's Table 2, after the second stage."""
    figures = {
        "eos": ((67.85, 58.39), (66.50, 56.59)),
        "mean": ((68.97, 58.71), (68.13, 57.88)),
        "latent_attention": ((69.32, 59.36), (68.47, 58.33)),
        "self_attention": ((69.10, 58.64), (68.16, 57.71)),
    }
    return {
        f"pooling.kind={pooling}, model.mask={mask}": {
            "Average (56)": average,
            "Retrieval (15)": retrieval,
        }
        for pooling, both in figures.items()
        for mask, (average, retrieval) in zip(("bidirectional", "causal"), both, strict=True)
    }


def nvembed_2() -> dict[str, Run]:
    """Run of NV-Embed's Table 2: version 1, which uses only public data, without mining and
    synthetic data.
    """
    return {"": nvembed.nvembed_v1()}


def nvembed_2_small() -> dict[str, Run]:
    """Run of NV-Embed's Table 2 at small size: the quickstart, whose pooling and mask the search
    space sets.
    """
    return {"": nvembed_quickstart()}


def printed_nvembed_4() -> PrintedFigures:
    """Published scores of NV-Embed's Table 4, where "two stages" with examples and "S3" are the
    same run.
    """
    figures = {
        "single stage, in-batch": (70.83, 61.25),
        "single stage": (71.94, 61.37),
        "two stages": (72.31, 62.65),
        "reversed stages": (71.85, 61.91),
        "labels for documents": (70.82, 62.40),
        "S0: no positive-aware mining": (70.73, 59.22),
        "S1: with mining": (71.83, 61.52),
        "S2: with added data": (72.07, 62.28),
        "NV-Embed-v1": (69.32, 59.36),
    }
    return {
        row: {"Average (56)": average, "Retrieval (15)": retrieval}
        for row, (average, retrieval) in figures.items()
    }


def printed_nvembed_4_small() -> PrintedFigures:
    """Published scores of the rows of NV-Embed's Table 4 that the quickstart can reproduce.

    The quickstart has no added and no synthetic data, as the paper's S0 and S1 have none: its two
    stages are compared with S1 and S0, and the whole model with the other rows.
    """
    printed = printed_nvembed_4()

    def public(row: str) -> dict[str, float]:
        return {f"{column}, public data": figure for column, figure in printed[row].items()}

    without_mining = "S0: no positive-aware mining"
    rows = ("single stage, in-batch", "single stage", "reversed stages", "labels for documents")
    return {
        "two stages": {**printed["two stages"], **public("S1: with mining")},
        **{row: printed[row] for row in rows},
        without_mining: public(without_mining),
    }


def nvembed_4() -> dict[str, Run]:
    """Runs of NV-Embed's Table 4: version 2 and its ablations."""
    whole = nvembed.nvembed_v2()

    def built(name: str, *, mined: bool, added: bool) -> Run:
        return nvembed.published(name, mined=mined, added=added, synthetic=False, labels="example")

    return {
        "single stage, in-batch": single_stage(whole, "table4-a", in_batch=True),
        "single stage": single_stage(whole, "table4-b", in_batch=False),
        "two stages": whole,
        "reversed stages": reversed_stages(whole, "table4-d"),
        "labels for documents": nvembed.published(
            "table4-e", mined=True, added=True, synthetic=True, labels="label"
        ),
        "S0: no positive-aware mining": built("table4-f", mined=False, added=False),
        "S1: with mining": built("table4-g", mined=True, added=False),
        "S2: with added data": built("table4-h", mined=True, added=True),
        "NV-Embed-v1": nvembed.nvembed_v1(),
    }


def nvembed_4_small() -> dict[str, Run]:
    """Runs of NV-Embed's Table 4 at small size: rows for which the quickstart has the data.

    Its second stage has no in-batch negatives, so without any mining it could not learn retrieval;
    S0 mines without regard to the positive's score.
    """
    whole = nvembed_quickstart()
    topics = ("wiki-topic-classification", "wiki-topic-clustering")
    mined = ("wiki-description", "wiki-sentence")
    return {
        "single stage, in-batch": single_stage(whole, "table4-a", in_batch=True),
        "single stage": single_stage(whole, "table4-b", in_batch=False),
        "two stages": whole,
        "reversed stages": reversed_stages(whole, "table4-d"),
        "labels for documents": override(
            whole, [f"data.datasets.{name}.source.label_form=label" for name in topics]
        ),
        "S0: no positive-aware mining": override(
            whole, [f"data.datasets.{name}.mining.rule.kind=top_k" for name in mined]
        ),
    }


def causal2vec_bases() -> dict[str, Run]:
    """Label → run of published size, for each of the two LLMs in Causal2Vec's ablations."""
    return {_SLLAMA: causal2vec.sheared_llama_1_3b(), _MISTRAL: causal2vec.mistral_7b()}


def causal2vec_small() -> dict[str, Run]:
    """Run of Causal2Vec's ablations at small size: the quickstart, whose settings the search space
    sets.
    """
    return {"": causal2vec_quickstart()}


def causal2vec_2() -> dict[str, Run]:
    """Runs of Causal2Vec's Table 2 for both LLMs."""
    return {
        f"{backbone}, {row}": run
        for backbone, whole in causal2vec_bases().items()
        for row, run in _parts_of_causal2vec(whole).items()
    }


def causal2vec_2_small() -> dict[str, Run]:
    """Runs of Causal2Vec's Table 2 at small size."""
    return _parts_of_causal2vec(causal2vec_quickstart())


def _parts_of_causal2vec(whole: Run) -> dict[str, Run]:
    assert isinstance(whole.model, Causal2VecConfig)
    return {
        "neither": last_token(whole, "causal2vec-table2"),
        "Contextual token": changed(whole, model=changed(whole.model, representation="eos")),
        "Contextual token and concatenation": whole,
    }
