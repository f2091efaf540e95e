"""Figures that papers print, as data: one file a paper, one line a figure."""
