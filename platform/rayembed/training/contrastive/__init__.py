"""The contrastive training objective and its step."""
