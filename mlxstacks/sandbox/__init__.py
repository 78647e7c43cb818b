"""Programs that nobody has read, run without network, files or time to harm: Linux and macOS."""
