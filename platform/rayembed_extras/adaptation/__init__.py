"""Continue masked-language pretraining of an encoder on packed, masked token sequences."""
