"""Running any architecture, without knowledge of optimisers and the supernet."""
