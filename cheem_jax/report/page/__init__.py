"""A self-contained HTML page about one or more runs. It needs no network and can be opened as a
file."""
