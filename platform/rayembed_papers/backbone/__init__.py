"""Backbones scored by finetuning: GLUE and XTREME-R (Nomic Embed v2, Tables 3 and 4)."""
