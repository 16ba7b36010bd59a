"""One file for each step, in order.  A step that has been released is not edited any more."""
