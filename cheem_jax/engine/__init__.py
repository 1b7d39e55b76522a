"""Functions that run any architecture. They do not depend on the optimiser or the supernet."""
