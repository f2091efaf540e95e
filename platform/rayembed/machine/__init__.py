"""Hardware detection for this machine (devices, number types, cores), and work that runs in
background threads and processes.
"""
