"""Several trained models of one architecture merged into one."""
