"""Check at a small size whether the papers' claims about better methods hold."""
