"""Losses over the scores of lists: a query's positive and its hard negatives, each in one file."""
