"""From settings to the objects of a run, for the command line and the library alike."""
