"""Low-rank adapters."""

from pydantic import Field, PositiveInt

from rayembed.config.settings import Settings


class LoraConfig(Settings):
    """Low-rank adapters on the backbone; pooling layers are fully trained."""

    rank: PositiveInt = 16
    """Rank of the adapters (NV-Embed, Table 11)."""
    alpha: PositiveInt = 32
    """Scale α of the adapters (NV-Embed, Table 11)."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout of the adapters (NV-Embed, Table 11)."""
    target_modules: tuple[str, ...] = Field(
        default=(
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ),
        min_length=1,
    )
    """Names of the linear layers that get an adapter."""
