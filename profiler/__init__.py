"""How a job's speed depends on CPUs and memory: measure, model, write, explain."""
