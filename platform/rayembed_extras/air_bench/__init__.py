"""AIR-Bench 24.04 and 24.05: score dev splits, and write the results of test splits for the
leaderboard.

Test labels are hidden. Scores of test splits come only from the leaderboard; what is computed here
are scores of the public dev splits of 24.05. Chen et al., arXiv 2412.13102.
"""
