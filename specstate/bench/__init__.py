"""``specstate bench``: what a step costs, measured on this machine."""
