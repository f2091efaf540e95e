"""Clean scores: scores of a model without the test texts that it was trained on."""
