"""sentence-transformers as the other side of a comparison: padded, and unpadded where it can be.

It leaves out padding where transformers finds flash-attn: the package, or `flash_shim/` on
PYTHONPATH, which runs torch's own FlashAttention 2 kernel.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.measuring import check, has_flash_attention

PADDED = "sentence-transformers, padded (SDPA)"
NAME = "sentence-transformers, unpadded"


def attentions() -> Iterator[tuple[str, str]]:
    """Name of each side that this environment has, and its attention in transformers."""
    yield PADDED, "sdpa"
    if has_flash_attention():
        import flash_attn

        shim = "+torch" in flash_attn.__version__
        kernel = "torch's FlashAttention 2" if shim else f"flash-attn {flash_attn.__version__}"
        yield f"{NAME} ({kernel})", "flash_attention_2"
    else:
        print("no flash-attn is found: sentence-transformers runs with padding alone")


def loaded(folder: Path, device: torch.device, dtype: str, attention: str) -> Any:
    """A SentenceTransformer from a folder of transformers.

    Raises:
        SystemExit: it should leave out padding and does not.
    """
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(folder),
        device=str(device),
        model_kwargs={"attn_implementation": attention, "dtype": getattr(torch, dtype)},
    )
    if attention == "flash_attention_2":
        check(bool(model[0].can_flatten_inputs), "sentence-transformers leaves out padding")
    return model
