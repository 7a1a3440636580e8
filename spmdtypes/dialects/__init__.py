"""Programs annotated for other tools, read as they stand. See README.md."""
