"""Plain bi-encoders: any encoder (or decoder) of transformers with simple pooling."""
