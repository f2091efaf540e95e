"""The batch plan: policies that order rows, the plan's files, and a worker's view of them."""
