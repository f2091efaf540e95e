"""Output for users: tables, figures, progress, and a quiet log."""
