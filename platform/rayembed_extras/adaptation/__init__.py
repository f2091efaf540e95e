"""Token sequences for masked-language modelling: packed, ordered, masked."""
