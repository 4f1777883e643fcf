"""The page of a run, or of several, from their folders."""
