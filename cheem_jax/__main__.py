"""`python -m cheem_jax` is the `cheem` command."""

if __name__ == "__main__":
    # imported here: worker processes that decode images import this file, too
    from cheem_jax.cli.main import main

    main()
