"""Plain bi-encoders: any encoder or decoder of transformers with a pooling without weights."""
