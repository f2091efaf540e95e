"""Script check: whether a text is written in a script of its language. Needs no model."""

import unicodedata
from collections import Counter

_SCRIPTS = {
    "ar": {"ARABIC"},
    "be": {"CYRILLIC"},
    "bg": {"CYRILLIC"},
    "bn": {"BENGALI"},
    "el": {"GREEK"},
    "fa": {"ARABIC"},
    "gu": {"GUJARATI"},
    "he": {"HEBREW"},
    "hi": {"DEVANAGARI"},
    "hy": {"ARMENIAN"},
    "ja": {"HIRAGANA", "KATAKANA", "CJK", "KATAKANA-HIRAGANA"},
    "ka": {"GEORGIAN"},
    "km": {"KHMER"},
    "kn": {"KANNADA"},
    "ko": {"HANGUL", "CJK"},
    "mk": {"CYRILLIC"},
    "ml": {"MALAYALAM"},
    "mr": {"DEVANAGARI"},
    "my": {"MYANMAR"},
    "ne": {"DEVANAGARI"},
    "pa": {"GURMUKHI"},
    "ru": {"CYRILLIC"},
    "ta": {"TAMIL"},
    "te": {"TELUGU"},
    "th": {"THAI"},
    "uk": {"CYRILLIC"},
    "ur": {"ARABIC"},
    "zh": {"CJK"},
}
"""Non-Latin scripts by language, as prefixes of Unicode letter names."""

_LATIN = (
    "af ca cs cy da de en es et eu fi fr ga gl hr hu id is it lt lv ms nl no pl pt ro sk sl sq sv "
    "sw tl tr vi"
)
"""Codes of languages written in Latin letters."""

_LEAST_SHARE = 0.5
"""Minimum share of letters in the language's script; names, formulas and code keep their own."""

_LETTERS_READ = 2000


def in_script_of(language: str, text: str) -> bool:
    """Whether at least half of the letters are in a script of the language; unknown codes pass.

    Args:
        language: code, of which only what stands before `-` or `_` counts: `zh-Hans`.
        text: of which the first 2,000 characters are read.
    """
    code = language.replace("_", "-").partition("-")[0].lower()
    allowed = {"LATIN"} if code in _LATIN.split() else _SCRIPTS.get(code)
    if allowed is None:
        return True
    scripts = Counter(
        unicodedata.name(character, "?").partition(" ")[0]
        for character in text[:_LETTERS_READ]
        if character.isalpha()
    )
    written = sum(scripts.values())
    return written == 0 or sum(scripts[name] for name in allowed) >= _LEAST_SHARE * written
