"""What NV-Embed's appendix A prints (arXiv 2405.17428, Tables 6 to 8): means over MTEB, percent."""

from collections.abc import Mapping

METHODS = ("magnitude", "wanda", "sparsegpt")
STRUCTURES = ("2:4", "4:8", "unstructured")

PRUNED: Mapping[tuple[str, str], float] = {
    ("magnitude", "2:4"): 64.62,
    ("magnitude", "4:8"): 67.6,
    ("magnitude", "unstructured"): 69.18,
    ("wanda", "2:4"): 64.26,
    ("wanda", "4:8"): 67.87,
    ("wanda", "unstructured"): 70.19,
    ("sparsegpt", "2:4"): 68.48,
    ("sparsegpt", "4:8"): 70.11,
    ("sparsegpt", "unstructured"): 71.33,
}
"""Table 6, rows `Pruning`: (method, structure) → score."""

RETRAINED: Mapping[tuple[str, str], float] = {
    ("magnitude", "2:4"): 69.96,
    ("magnitude", "4:8"): 70.46,
    ("magnitude", "unstructured"): 70.84,
    ("wanda", "2:4"): 69.74,
    ("wanda", "4:8"): 70.42,
    ("wanda", "unstructured"): 70.81,
    ("sparsegpt", "2:4"): 70.41,
    ("sparsegpt", "4:8"): 70.9,
    ("sparsegpt", "unstructured"): 71.18,
}
"""Table 6, rows `Re-train`, by labels."""

DISTILLED: Mapping[tuple[str, str], float] = {
    ("sparsegpt", "2:4"): 71.17,
    ("sparsegpt", "4:8"): 71.22,
    ("sparsegpt", "unstructured"): 71.48,
}
"""Table 7, row `GT+KD`."""

QUANTISED: Mapping[tuple[str, str], float] = {
    ("gptq", "2:4"): 71.17,
    ("gptq", "4:8"): 71.23,
    ("gptq", "unstructured"): 71.49,
    ("fp8", "2:4"): 70.94,
    ("fp8", "4:8"): 71.28,
    ("fp8", "unstructured"): 71.55,
}
"""Table 8: (INT8 by GPTQ or FP8 E4M3, structure of the pruned and distilled model) → score."""
