"""Which adapter goes to which device: pure functions, and a simulation of a cluster that uses them."""
