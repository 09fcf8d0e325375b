"""Readers of traces, profiles, clusters, costs, failures and interference: text in, values out."""
