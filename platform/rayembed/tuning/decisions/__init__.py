"""What is tried next, and which trial is ended."""
