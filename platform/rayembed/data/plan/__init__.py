"""The batch plan: policies that order rows, its files, and what a worker reads of it."""
