"""Hard negatives from a teacher: rules, the search they use, tasks over parts."""
