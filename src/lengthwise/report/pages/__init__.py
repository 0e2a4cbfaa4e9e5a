"""HTML pages and their text."""
