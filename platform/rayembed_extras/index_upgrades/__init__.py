"""Change the model of an index: map queries into its space, or embed its documents again."""
