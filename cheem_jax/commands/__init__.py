"""The sub-commands of `cheem`, one file each: a dataclass of settings and the function that carries it out."""
