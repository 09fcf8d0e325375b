"""The SQLite store: writer, reader, codec."""
