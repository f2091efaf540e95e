"""Wikipedia sample: small training files and a benchmark for quickstarts, made from article
summaries.
"""
