"""What a run is (identity) and where it runs (placement). Imports neither torch nor Ray."""
