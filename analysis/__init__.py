"""What decentralisation costs: experiments and reports over run folders."""
