"""Rows of NV-Embed's Table 12 with classes: classification and clustering."""

from dataclasses import dataclass

from rayembed.recipes.data_recipes import Home
from rayembed_papers.mixtures.datasets import nvembed_homes as homes
from rayembed_papers.mixtures.datasets.bge import bge_full


@dataclass(frozen=True)
class ClassRow:
    """A row of Table 12 with classes."""

    name: str
    instruction: str
    num_samples: int
    benchmark: str
    """mteb task used for evaluation, whose texts must not be trained on."""
    home: Home
    examples: Home | None = None
    """Alternative location in which documents are examples; None: the same."""


_ARXIV = "Identify the main and secondary category of Arxiv papers based on the titles"
_BIORXIV = "Identify the main category of Biorxiv papers based on the titles"
_MEDRXIV = "Identify the main category of Medrxiv papers based on the titles"
_ABSTRACTS = " and abstracts"
_UTTERANCE = "Given a user utterance as query, find the user "
_INTENT = "Classify the intent of the given utterance in task-oriented conversation"
_DOMAIN = "Classify the intent domain of the given utterance in task-oriented conversation"
_MEDRXIV_SLIP = _MEDRXIV + _ABSTRACTS
"""Instruction that the paper prints for Reddit and Stackexchange, apparently by mistake."""

LABELLED = (
    ClassRow(
        "amazon-counterfactual",
        "Classify a given Amazon customer review text as either counterfactual or "
        "not-counterfactual",
        6_000,
        "AmazonCounterfactualClassification",
        homes.mteb_classes(
            "AmazonCounterfactualClassification",
            "mteb/amazon_counterfactual",
            "CC BY 4.0",
            subset="en",
        ),
    ),
    ClassRow(
        "amazon-polarity",
        "Classify Amazon reviews into positive or negative sentiment",
        20_000,
        "AmazonPolarityClassification",
        homes.mteb_classes("AmazonPolarityClassification", "mteb/amazon_polarity", "Apache 2.0"),
    ),
    ClassRow(
        "amazon-reviews",
        "Classify the given Amazon review into its appropriate rating category",
        40_000,
        "AmazonReviewsClassification",
        homes.mteb_classes(
            "AmazonReviewsClassification",
            "mteb/AmazonReviewsClassification",
            "https://docs.opendata.aws/amazon-reviews-ml/license.txt",
            subset="en",
            names={str(stars - 1): f"{stars} stars" for stars in range(1, 6)} | {"0": "1 star"},
        ),
    ),
    ClassRow(
        "banking77",
        "Given an online banking query, find the corresponding intents",
        10_000,
        "Banking77Classification",
        homes.mteb_classes("Banking77Classification", "mteb/banking77", "MIT"),
    ),
    ClassRow(
        "imdb",
        "Classify the sentiment expressed in the given movie review text from the IMDB dataset",
        24_000,
        "ImdbClassification",
        homes.mteb_classes("ImdbClassification", "mteb/imdb", ""),
    ),
    ClassRow(
        "toxic-conversations",
        "Classify the given comments as either toxic or not toxic",
        50_000,
        "ToxicConversationsClassification",
        homes.mteb_classes(
            "ToxicConversationsClassification", "mteb/toxic_conversations_50k", "CC BY 4.0"
        ),
    ),
    ClassRow(
        "tweet-sentiment-extraction",
        "Classify the sentiment of a given tweet as either positive, negative, or neutral",
        27_000,
        "TweetSentimentExtractionClassification",
        homes.mteb_classes(
            "TweetSentimentExtractionClassification", "mteb/tweet_sentiment_extraction", ""
        ),
    ),
)
"""Classification whose documents are class names in both versions."""

MULTI_CLASS = (
    ClassRow(
        "emotion",
        "Classify the emotion expressed in the given Twitter message into one of the six "
        "emotions: anger, fear, joy, love, sadness, and surprise",
        16_000,
        "EmotionClassification",
        homes.mteb_classes("EmotionClassification", "mteb/emotion", ""),
    ),
    ClassRow(
        "mtop-intent",
        _INTENT,
        15_000,
        "MTOPIntentClassification",
        homes.mteb_classes(
            "MTOPIntentClassification", "mteb/MTOPIntentClassification", "", subset="en"
        ),
    ),
    ClassRow(
        "mtop-domain",
        _DOMAIN,
        15_000,
        "MTOPDomainClassification",
        homes.mteb_classes(
            "MTOPDomainClassification", "mteb/MTOPDomainClassification", "", subset="en"
        ),
    ),
    ClassRow(
        "massive-intent",
        _UTTERANCE + "intents",
        11_000,
        "MassiveIntentClassification",
        homes.mteb_classes(
            "MassiveIntentClassification", "mteb/amazon_massive_intent", "Apache 2.0", subset="en"
        ),
    ),
    ClassRow(
        "massive-scenario",
        _UTTERANCE + "scenarios",
        11_000,
        "MassiveScenarioClassification",
        homes.mteb_classes(
            "MassiveScenarioClassification",
            "mteb/amazon_massive_scenario",
            "Apache 2.0",
            subset="en",
        ),
    ),
)
"""The five classification data sets of Table 5: examples in version 2, class names in version 1."""

_TWEAC = "https://github.com/UKPLab/TWEAC-qa-agent-selection"
_SITES = (
    "The public files are one a site, whose name is the label and stands in no column: write it "
    "beside each text."
)

CLUSTERING = (
    ClassRow(
        "arxiv-p2p",
        _ARXIV + _ABSTRACTS,
        50_000,
        "ArxivClusteringP2P",
        homes.preprints("arxiv", "title+abstract", "CC0 1.0"),
    ),
    ClassRow(
        "arxiv-s2s",
        _ARXIV,
        50_000,
        "ArxivClusteringS2S",
        homes.preprints("arxiv", "title", "CC0 1.0"),
    ),
    ClassRow(
        "biorxiv-p2p",
        _BIORXIV + _ABSTRACTS,
        15_000,
        "BiorxivClusteringP2P",
        homes.preprints("biorxiv", "title+abstract", ""),
    ),
    ClassRow(
        "biorxiv-s2s",
        _BIORXIV,
        15_000,
        "BiorxivClusteringS2S",
        homes.preprints("biorxiv", "title", ""),
    ),
    ClassRow(
        "medrxiv-p2p",
        _MEDRXIV + _ABSTRACTS,
        2_300,
        "MedrxivClusteringP2P",
        homes.preprints("medrxiv", "title+abstract", ""),
    ),
    ClassRow(
        "medrxiv-s2s",
        _MEDRXIV,
        2_300,
        "MedrxivClusteringS2S",
        homes.preprints("medrxiv", "title", ""),
    ),
    ClassRow(
        "reddit",
        _MEDRXIV_SLIP,
        50_000,
        "RedditClusteringP2P",
        homes.reddit_titles_and_bodies(),
    ),
    ClassRow(
        "reddit-s2s",
        _MEDRXIV_SLIP,
        40_000,
        "RedditClustering",
        homes.own_classes("reddit-s2s", _TWEAC, "`text`: a title; `label`: its subreddit."),
        examples=bge_full("reddit_clustering"),
    ),
    ClassRow(
        "stackexchange-clustering",
        _MEDRXIV_SLIP,
        50_000,
        "StackExchangeClusteringP2P",
        homes.own_classes(
            "stackexchange-clustering",
            "https://huggingface.co/datasets/flax-sentence-embeddings/"
            "stackexchange_title_body_jsonl",
            _SITES,
        ),
        examples=bge_full("stack_exchange_clusteringP2P"),
    ),
    ClassRow(
        "stackexchange-clustering-s2s",
        _MEDRXIV_SLIP,
        40_000,
        "StackExchangeClustering",
        homes.own_classes("stackexchange-clustering-s2s", _TWEAC, _SITES),
        examples=bge_full("stack_exchange_clustering"),
    ),
    ClassRow(
        "twenty-newsgroups",
        "Identify the topic or theme of the given news articles",
        1_700,
        "TwentyNewsgroupsClustering",
        homes.NEWSGROUPS,
    ),
)
"""The eleven clustering data sets: examples in version 2, class names in version 1."""
