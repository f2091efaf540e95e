"""What a user sees: tables, figures, progress, and a quiet log."""
