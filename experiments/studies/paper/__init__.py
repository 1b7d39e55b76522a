"""The paper's printed numbers, collected runs, and the page of results made from them."""
