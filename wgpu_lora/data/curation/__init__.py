"""`data prepare`: files of rows in any format to training, held-out and preference rows without duplicates.

inputs                        names, folders and globs to sources
kinds                         rows to kinds: examples, pairs, labelled answers
thinking -> edits -> checks   what is dropped from a row, and why a row is rejected
content -> seen, near         what makes rows duplicates
output                        a new directory, complete or not at all
options, counts -> run        everything together
"""

from wgpu_lora.data.curation.curate import prepare_files
from wgpu_lora.data.curation.curation_options import Preparation

__all__ = ["Preparation", "prepare_files"]
