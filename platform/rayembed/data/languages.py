"""Language of texts by the words that are frequent in it, and script by their letters."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

ENGLISH = "eng-Latn"

_LEAST_SHARE = 0.1
"""Share of all words that frequent words of their language have at least; a third in running
text."""
_AHEAD = 1.25
"""How many times as frequent the words of a language are at least as those of the next one."""

_WORDS: Mapping[str, str] = {
    ENGLISH: "the of and to in is that for it with as was on are by this be from at or a an which "
    "how what i my do can not if you all when",
    "fra-Latn": "le la les l de des du d un une et est en dans que qui pour au aux pas avec "
    "par il elle je mon ma sont ce cette comment où plus son sa ses",
    "spa-Latn": "el la los las de del un una y es en que para al con por se su sus no como cómo "
    "qué mi más pero este esta fue",
    "deu-Latn": "der die das den dem des und eine in zu von mit für auf nicht im wie was ich "
    "auch wird bei sich kann",
    "ita-Latn": "il lo la gli le di del della dei un una e è che per con non sono in da come nel "
    "al alla si mi",
    "por-Latn": "o os a as de do da dos das um uma e é em no na que para com não por se mais ao "
    "como meu são foi",
    "nld-Latn": "de het een en van is in dat op te voor met niet zijn aan er ook bij hoe ik mijn "
    "wat",
}
"""Language → its most frequent words."""


_ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}
"""First word of a letter's Unicode name → script, where that is another word."""
_READ = 400
"""Characters of a text whose script is looked at."""


def language_of(texts: Iterable[str], least: int = 1) -> str:
    """Detect the language of most texts by its frequent words, as mteb's code (`fra-Latn`); empty
    if unknown or mixed.

    Args:
        least: number of frequent words that the texts have at least.
    """
    words = Counter(word for text in texts for word in re.findall(r"\w+", text.lower()))
    found = Counter(
        {name: sum(words[word] for word in listed.split()) for name, listed in _WORDS.items()}
    )
    (first, most), (_, next_most) = found.most_common(2)
    enough = most >= max(least, _LEAST_SHARE * words.total()) and most >= _AHEAD * next_most
    return first if enough else ""


def script_of(text: str) -> str:
    """Script of most letters of a text by its Unicode name (`latin`, `cyrillic`, `cjk`); empty
    without letters.
    """
    names = (
        unicodedata.name(sign, "").partition(" ")[0] for sign in text[:_READ] if sign.isalpha()
    )
    found = Counter(_ONE_SCRIPT.get(name, name) for name in names)
    return found.most_common(1)[0][0].lower() if found else ""
