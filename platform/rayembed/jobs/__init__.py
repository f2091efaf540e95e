"""The command `rayembed`: a table of jobs by their names, and what starts one of them."""
