"""What holds when the service dies: lock, watchdog, release."""
