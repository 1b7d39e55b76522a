"""Functions that run any architecture. They do not depend on the optimizer or the supernet."""
