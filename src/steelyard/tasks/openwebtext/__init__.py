"""OpenWebText, as token files."""
