"""The concepts of the method as small types, and pure functions over them."""
