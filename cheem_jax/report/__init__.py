"""What people look at: tables, figures, the written report and the page."""
