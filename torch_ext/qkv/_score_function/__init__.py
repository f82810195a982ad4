"""Score functions of users as programs of instructions (csrc/program): see `cache.traced`, and
`arguments` for what operators are told."""
