"""Lower bounds on the time of any plan."""
