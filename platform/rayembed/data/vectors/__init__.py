"""Text vectors of teacher models: loading, embedding, reusable files."""
