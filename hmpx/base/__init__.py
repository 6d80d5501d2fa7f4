"""What `ops` and `updates` stand on: changes that can be undone, the state of a process and a thread, files."""
