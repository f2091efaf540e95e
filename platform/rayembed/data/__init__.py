"""Training data: records, sources and their conversion, hard-negative mining, batch plans and the
stream of batches.
"""
