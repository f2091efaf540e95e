"""Optional features, each in a package of its own that the library does not import."""
