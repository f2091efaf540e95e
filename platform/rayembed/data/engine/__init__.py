"""How steps of data preparation run: work items, files of records, and the shuffle of rows between
tasks.
"""
