"""Handling of hung, failed and removed workers."""
