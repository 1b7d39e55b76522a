"""Benchmarks of speed, memory and communication, and the page that shows them."""
