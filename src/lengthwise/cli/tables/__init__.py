"""What commands print for people: tables and lines from results of the session."""
