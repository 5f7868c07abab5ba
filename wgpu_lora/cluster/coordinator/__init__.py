"""What a cluster has to do, what it is doing, and who decides it: a state machine, its journal, and its Ray actor."""
