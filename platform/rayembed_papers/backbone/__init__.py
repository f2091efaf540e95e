"""Score backbones by finetuning on GLUE and XTREME-R (Nomic Embed v2, Tables 3 and 4)."""
