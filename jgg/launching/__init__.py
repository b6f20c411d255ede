"""Runs one launch of a kernel: chooses how, compiles the kernel and keeps it, launches it on a GPU or interprets it."""
