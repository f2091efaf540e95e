"""Define the papers' tables as sweeps: each row is a run, with its published scores."""
