"""How any architecture runs; what is learned is not known here."""
