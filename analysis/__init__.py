"""Measures what decentralisation costs: experiments, and reports on run folders."""
