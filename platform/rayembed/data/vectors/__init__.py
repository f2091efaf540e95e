"""Vectors of texts by a teacher model: how it is loaded, files kept and reused."""
