"""Makes the objects of a run from settings, for the command line and the library alike."""
