"""Every op in C++ for CPUs: vectorised, on one pool of threads, each row computed for itself."""
