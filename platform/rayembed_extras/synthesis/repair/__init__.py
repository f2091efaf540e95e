"""Label repair: a judge detects false negatives, which are relabelled or dropped."""
