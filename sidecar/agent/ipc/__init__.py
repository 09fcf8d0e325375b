"""Sockets, frames and shared pages."""
