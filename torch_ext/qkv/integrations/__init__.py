"""Switches of other libraries, each in a module of its own that imports its library when it is
used and not before."""
