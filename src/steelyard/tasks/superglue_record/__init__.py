"""ReCoRD of SuperGLUE, as a cloze."""
