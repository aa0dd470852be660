"""Files that others may have made: opened and unpacked so that they can neither hang a process nor fill its memory."""
