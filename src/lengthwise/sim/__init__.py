"""A second executor of plans, in virtual time."""
