"""What planners choose among: candidate pipelines and the planning problem."""
