"""Starting worker processes, and finding out whether this process is one."""
