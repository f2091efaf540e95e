"""The training data sets of the papers: where each lives, how it is read, how much of it counts."""
