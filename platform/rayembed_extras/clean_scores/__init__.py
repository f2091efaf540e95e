"""Clean scores: which test texts a model was trained on, and its scores without them."""
