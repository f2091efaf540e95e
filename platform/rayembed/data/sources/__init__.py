"""Sources of training data (files, the Hugging Face hub, mteb, samples) and their conversion to
records.
"""
