"""The data sets of the papers, where they live, and data recipes made of them."""
