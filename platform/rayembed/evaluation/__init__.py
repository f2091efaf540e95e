"""Scores through mteb, in mteb's result format, and the tables made of them."""
