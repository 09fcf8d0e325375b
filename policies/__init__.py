"""Pure scheduling policies: data in, data out; nothing here does I/O or reads a clock."""
