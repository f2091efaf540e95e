"""Hard-negative mining with teachers: candidate search, rules that refuse likely positives, and the
tasks that run both.
"""
