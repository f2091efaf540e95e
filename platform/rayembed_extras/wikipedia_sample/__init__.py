"""The Wikipedia sample: makes the files and the benchmark that quickstarts train on and score."""
