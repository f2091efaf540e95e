"""Guard over processes that do units of data work on Ray."""
