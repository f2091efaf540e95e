"""Hard-negative mining with teachers: rules, search, and tasks over parts."""
