"""Sources of training rows used only by the papers' mixtures."""
