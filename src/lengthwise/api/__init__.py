"""What users import: a prepared run from a model and a corpus."""
