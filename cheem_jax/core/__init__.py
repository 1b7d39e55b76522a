"""Small types for the concepts of the method, and pure functions on these types."""
