"""`python -m cheem_jax` is the `cheem` command."""

if __name__ == "__main__":
    # here, because worker processes that decode pictures import this file too, and need nothing of
    # it
    from cheem_jax.cli.main import main

    main()
