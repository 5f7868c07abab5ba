"""What a run trains (--train), one file each; train/subject.py is the interface."""
