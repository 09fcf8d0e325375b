"""The driver path: jobs that did not attach are stopped by CUDA's process checkpoint API, from a helper process."""
