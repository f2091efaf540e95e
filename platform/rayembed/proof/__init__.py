"""The proof in a model folder: texts with the model's reference vectors, by which any copy of the
model is checked.
"""
