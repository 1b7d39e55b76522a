"""The `cheem` command."""
