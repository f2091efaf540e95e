"""What context documents bring a contextual model, and how hard its batches are (CDE)."""
