"""Label repair: false negatives are found by a judge, then relabelled or dropped."""
