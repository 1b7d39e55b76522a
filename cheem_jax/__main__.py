"""`python -m cheem_jax` is the `cheem` command."""

if __name__ == "__main__":
    # imported here, because worker processes that decode images also import this file
    from cheem_jax.cli.main import main

    main()
