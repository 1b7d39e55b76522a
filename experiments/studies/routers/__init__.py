"""Routers beside each other on finished runs."""
