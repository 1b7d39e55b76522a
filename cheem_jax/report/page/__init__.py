"""One self-contained HTML page about one or several runs: it needs no network and opens from the
disk."""
