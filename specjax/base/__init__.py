"""What everything else stands on: pytrees, named axes, sampling, and files that are written."""
