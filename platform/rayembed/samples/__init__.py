"""The Wikipedia sample as ordinary files: pairs, classes, texts and own evaluation sets."""
