"""Work items, parts, exchange and shuffle: how steps of data preparation run."""
