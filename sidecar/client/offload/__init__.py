"""GPU state to host memory and back."""
