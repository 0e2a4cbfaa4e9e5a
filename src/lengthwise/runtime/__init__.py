"""Everything that needs torch: it obeys plans and reports what happened."""
