"""Shell completion of the `rayembed` command."""
