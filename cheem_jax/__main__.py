"""`python -m cheem_jax` is the `cheem` command."""

from cheem_jax.cli import main

main()
