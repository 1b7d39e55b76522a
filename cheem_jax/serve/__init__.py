"""Images answered over HTTP, and a page in the browser that shows which blocks ran (extra `serve`)."""
