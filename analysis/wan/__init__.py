"""A wide-area network on one machine: hosts as network namespaces, and a router between them, slow on purpose."""
