"""The batch plan: policies that decide which rows share a batch, the plan's files, and reading them
for one worker.
"""
