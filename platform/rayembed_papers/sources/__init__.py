"""Sources of training rows that only the papers' mixtures use."""
