"""ReCoRD of SuperGLUE: filling a query's blank with an entity of a passage, as a cloze."""
