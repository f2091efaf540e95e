"""Execution of data preparation: work items, files of records, and the shuffle of rows between
tasks.
"""
