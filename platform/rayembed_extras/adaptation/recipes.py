"""Adaptations of Nomic Embed v2 (arXiv 2502.07972, section 4.1): published and laptop size.

What they leave is the `model.backbone.path` of the recipes in `nomic`.
"""

from collections.abc import Callable

from rayembed.config.backbone import BackboneConfig
from rayembed.config.placement import Placement
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import Linear
from rayembed.recipes.sample import MINILM, Language, Wikipedia
from rayembed_extras.adaptation.settings import (
    Adaptation,
    CorpusConfig,
    HeldOutWords,
    MaskedTraining,
    RotaryEncoderConfig,
    TextsConfig,
    TextsSource,
)

XLM_R = "hf://FacebookAI/xlm-roberta-base@main"


def adaptation_names() -> tuple[str, ...]:
    """Names of the recipes that `get_adaptation` accepts."""
    return tuple(_recipes())


def get_adaptation(name: str) -> Adaptation:
    """Return the complete settings of a named adaptation recipe.

    Raises:
        ConfigError: no such recipe; the message names the nearest one.
    """
    recipes = _recipes()
    if name not in recipes:
        raise ConfigError(f"no recipe {name!r}; {nearest(name, recipes)}")
    return recipes[name]()


def _recipes() -> dict[str, Callable[[], Adaptation]]:
    return {"nomic-adapt-quickstart": quickstart, "nomic-adapt": published}


def published() -> Adaptation:
    """mNomic-BERT (Table 2): XLM-R on segments of 2,048 tokens of CC100, 84 billion tokens.

    Adam's betas, its epsilon and no weight decay are of the released configuration, which the paper
    does not state. That configuration has 25,000 steps, 1,000 of warm-up, a rotary base of 100,000
    and no clipping; here is what the paper says. CC100 comes as text files: make rows with `text`
    and `language` of them, and name their folder by `--set corpus.root=…`.
    """
    cc100 = TextsSource(path="cc100/", text="text", language="language")
    return Adaptation(
        name="nomic-adapt",
        model=RotaryEncoderConfig(backbone=BackboneConfig(path=XLM_R)),
        corpus=CorpusConfig(texts=(TextsConfig(name="cc100", source=cc100),)),
        training=MaskedTraining(
            global_sequences=4096,
            optimizer=AdamW(
                learning_rate=4e-4,
                betas=(0.9, 0.98),
                eps=1e-6,
                warmup_steps=500,
                schedule=Linear(),
                gradient_clipping=1.0,
            ),
            steps=10_000,
            held_out=HeldOutWords(batches=1, every_steps=1000),
        ),
        placement=Placement(
            workers=16,
            use_gpu=True,
            cpus_per_worker=8.0,
            zero_stage=2,
            micro_batch_tokens=16_384,
        ),
    )


def quickstart() -> Adaptation:
    """all-MiniLM on English, French and Spanish summaries: a minute or two on two CPU cores.

    It shows the way and not the worth of it: so few steps teach a fresh head some frequent words.
    all-MiniLM is a finished model for sentences, which this takes it away from.
    """
    languages: tuple[Language, ...] = ("en", "fr", "es")
    texts = tuple(
        TextsConfig(
            name=f"wikipedia-{code}",
            source=TextsSource(path=Wikipedia().texts(code)),
            language=code,
        )
        for code in languages
    )
    return Adaptation(
        name="nomic-adapt-quickstart",
        model=RotaryEncoderConfig(backbone=BackboneConfig(path=MINILM)),
        corpus=CorpusConfig(texts=texts, max_length=64),
        training=MaskedTraining(
            global_sequences=32,
            optimizer=AdamW(
                learning_rate=4e-4, betas=(0.9, 0.98), eps=1e-6, warmup_steps=6, schedule=Linear()
            ),
            steps=60,
            checkpoint_every_steps=30,
            held_out=HeldOutWords(batches=4, every_steps=20),
        ),
        placement=Placement(
            workers=1,
            cpus_per_worker=1.0,
            threads_per_worker="auto",
            zero_stage=2,
            micro_batch_tokens=1024,
        ),
    )
