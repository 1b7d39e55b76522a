"""Tables, figures and pages that display results."""
