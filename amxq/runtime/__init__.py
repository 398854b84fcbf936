"""Running kernels: CPU detection, targets, the object cache, threads, compiling and launching."""
