"""Routers side by side on finished runs."""
