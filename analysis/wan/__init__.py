"""An emulated wide-area network on one machine: hosts are network namespaces, and a router delays their packets."""
