"""The Wikipedia sample: make the files and the benchmark for training and
scoring of quickstarts.
"""
