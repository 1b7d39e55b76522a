"""A self-contained HTML page about one or more runs. A browser can open the file without a network
connection."""
