"""The command `rayembed`: a table of jobs by name, and the code that starts one."""
