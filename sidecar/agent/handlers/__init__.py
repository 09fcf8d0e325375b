"""Handlers of messages: from a host's jobs and from the service."""
