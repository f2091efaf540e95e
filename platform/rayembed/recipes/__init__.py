"""Recipes: functions that return complete runs, one module for each model family."""
