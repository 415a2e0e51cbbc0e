"""Measurements on a GPU: agreement with the CPU, throughput, and trials that share the GPU."""
