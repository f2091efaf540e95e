"""The papers' tables as sweeps: rows as runs, and the published scores."""
