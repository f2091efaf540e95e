"""The papers' tables as sweeps: rows as runs, and the figures in print."""
