"""The contrastive objective and its step."""
