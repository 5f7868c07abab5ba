"""What the proof's child processes compute: `run(**arguments)` of each module gives what JSON can hold."""
