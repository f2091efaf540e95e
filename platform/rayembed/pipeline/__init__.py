"""From a resolved run to a registered model: the order in which the rooms are used."""
