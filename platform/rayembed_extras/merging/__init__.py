"""Merge trained models of one architecture into one."""
