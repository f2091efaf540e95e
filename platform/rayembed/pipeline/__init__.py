"""The way from a resolved run to a registered model, in the order in which the rooms are used."""
