"""Output for users: tables, figures, progress lines, and a log without libraries' noise."""
