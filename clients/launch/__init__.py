"""`firsttoken serve`: engine and facade as supervised child processes, under one set of flags."""
