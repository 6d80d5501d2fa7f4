"""What both roads stand on: changes that can be undone, the state of a process and of a thread, untrusted files."""
