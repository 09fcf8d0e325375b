"""Published workloads as generators: Synergy's, Gandiva's cluster mix and its AutoML search."""
